"""Families of ops that compute with numbers: by element, along axes, products of matrices."""
