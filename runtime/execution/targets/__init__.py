"""What a step does on each of the targets of a rank, and in which order."""
