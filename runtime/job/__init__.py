"""Facts about a process's job other than its transport: the status board, the machine, and errors that all ranks raise together."""
