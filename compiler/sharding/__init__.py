"""The sharding of each node on its group: given, or derived from what is given."""
