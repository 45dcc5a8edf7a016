"""How each node is cut on its group: what is given, and what is derived from it."""
