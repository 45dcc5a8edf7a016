"""The rewrites of a decoder that generates: its caches, positions, attention, and next token."""
