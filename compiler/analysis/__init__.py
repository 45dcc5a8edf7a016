"""What is inferred of the unsharded model: names of dims, types and shapes, entries of shape arithmetic, where a size was lost."""
