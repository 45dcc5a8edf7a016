"""Records the times of steps, for a profile or a trace, with the names of the actions."""
