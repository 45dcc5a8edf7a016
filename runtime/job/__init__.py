"""The facts about a process's job other than the transport: the status board, the machine, one outcome on all ranks."""
