"""What a program costs: the work of nodes by the op table, a machine's speeds, and a step of all ranks played with both."""
