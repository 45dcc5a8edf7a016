"""How values lie on groups of ranks, and how one layout becomes another."""
