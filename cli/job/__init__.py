"""The work of one rank of a job: its inputs, its steps or its training, its outputs."""
