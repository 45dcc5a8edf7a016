"""Reads plans of other systems into the start of a proposal: `partc plan MODEL --from FILE`."""
