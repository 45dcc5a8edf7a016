"""A compiled program held against the unsharded model."""
