"""Layouts of values on groups of ranks, and the change of one layout into another."""
