"""A loaded program: its steps, state and status."""
