"""The group of ranks that runs each node, and the reason."""
