"""The graph of a rank file: how nodes and bodies are read, targets, constants by rank, functions of optimizers."""
