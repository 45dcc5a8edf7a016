"""The data plane of the ranks of one host: their messages and reductions use memory that they share."""
