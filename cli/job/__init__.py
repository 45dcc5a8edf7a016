"""What one rank of a job does: its inputs, its steps or its training, its outputs."""
