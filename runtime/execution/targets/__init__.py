"""The actions of a step on each of the targets of a rank, and their order."""
