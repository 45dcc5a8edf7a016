"""Agreement between ranks: collectives, their order, layouts, positions of shards."""
