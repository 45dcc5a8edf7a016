"""Families of ops that change the shape, keep a part of the elements, or repeat them."""
