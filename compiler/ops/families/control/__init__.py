"""Families of ops with bodies, of sequences, and of local maps."""
