"""Batches that run as microbatches through stages: the task of each op, the bodies of tasks, and the rows of their calls."""
