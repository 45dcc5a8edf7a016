"""The comparison of a compiled model with the unsharded model."""
