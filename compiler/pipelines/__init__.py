"""Batches that run as microbatches through stages: which task each op is of, the bodies of tasks, and the rows of their calls."""
