"""Runs the updates of parameters by the optimizer, over flat memory."""
