"""The engine of gradients; it knows no op."""
