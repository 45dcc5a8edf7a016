"""Compares a compiled model with the unsharded model."""
