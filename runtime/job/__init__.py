"""What a process has of its job besides a transport: the status board, the machine, one outcome on all ranks."""
