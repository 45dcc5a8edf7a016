"""How far two runs of a model are apart, and how far rounding carries it."""
