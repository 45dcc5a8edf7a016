"""Derives values' shardings from those of nodes: operands, versions, partial sums that are passed on, and limits on resharding."""
