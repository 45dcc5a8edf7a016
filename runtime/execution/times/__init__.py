"""The times of steps, for a profile or a trace: which steps are recorded, how, and the names of the actions."""
