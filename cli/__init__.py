"""The `partc` command."""
