"""Families of ops that read and write elements by index."""
