"""Rewrites of the whole graph before it is sharded."""
