"""Checks of one rank file by itself: nodes, weights, types, and declared values."""
