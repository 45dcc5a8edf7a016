"""Training: the state that a rank keeps from step to step, checkpoints, schedules, and the loop around the steps."""
