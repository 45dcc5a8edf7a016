"""The graph of a rank file: readers of nodes and bodies, targets, constants that differ by rank, functions of optimizers."""
