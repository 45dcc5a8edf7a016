"""Which group of ranks runs each node, and why."""
