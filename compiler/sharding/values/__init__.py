"""From the shardings of nodes to values: operands, versions, sums that are passed on, what resharding may cost."""
