"""`partc measure`: measures the speed of this machine, with ranks that all work at the same time."""
