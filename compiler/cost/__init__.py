"""The cost of a program: the work of nodes by the op table, a machine's speeds, and the simulation of a step of all ranks."""
