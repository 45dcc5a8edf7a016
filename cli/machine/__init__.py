"""`partc measure`: the speeds of this machine, taken by ranks that all work at the same time."""
