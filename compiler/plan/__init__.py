"""The plan: the user's settings of ranks, symbols, inputs, placement and outputs, in YAML."""
