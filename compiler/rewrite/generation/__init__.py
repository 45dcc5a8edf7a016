"""Rewrites a decoder for generation: its caches, positions, attention, and next token."""
