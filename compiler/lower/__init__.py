"""One program per rank, out of one global order."""
