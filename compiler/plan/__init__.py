"""The plan: what the user says about ranks, symbols, inputs, placement and outputs, in YAML."""
