"""One rank file by itself: nodes, weights, types, and what it declares."""
