"""A loaded program: its steps, inputs, state, memory and times."""
