"""The cost of a program: the work of nodes according to the op table, a machine's speeds, and the simulation of a step on all ranks."""
