"""Checkpoints of the training state: all ranks of a job write one together, and a job with any number of ranks can read it."""
