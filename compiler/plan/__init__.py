"""The plan: the user's statements about ranks, symbols, inputs, placement and outputs, in YAML."""
