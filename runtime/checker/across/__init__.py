"""What ranks must agree on: collectives, their order, layouts, places of shards."""
