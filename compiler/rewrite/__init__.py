"""Rewrites the whole graph before it is sharded."""
