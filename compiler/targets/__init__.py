"""Kinds of devices within a rank: the device of each node, the values copied between devices, and the order with the fewest switches."""
