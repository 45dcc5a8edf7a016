"""Compares two runs of a model, and bounds their difference by rounding."""
