"""Analysis of the unsharded model: names of dims, types and shapes, entries of shape arithmetic, nodes at which a size becomes unknown."""
