"""Records and batches that come in an order of their own, from a `DataLoader` or an iterable. They cannot be read by an index."""
