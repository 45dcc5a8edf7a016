"""Records and batches that come in an order of their own: a `DataLoader`, an iterable. There is no index to read them by."""
