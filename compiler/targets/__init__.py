"""Kinds of devices within a rank: which runs each node, what is copied between them, and the order with the fewest switches."""
