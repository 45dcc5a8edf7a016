"""Training: the state that lives from step to step, checkpoints, schedules, and the loop around the steps."""
