"""The times of steps, for a profile or a trace: which are recorded, how, and what the actions are."""
