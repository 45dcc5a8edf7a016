"""Analysis of the unsharded model: names of dims, types and shapes, entries of shape arithmetic, nodes where a size was lost."""
