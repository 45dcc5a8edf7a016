"""The devices of a rank: which target runs where, and the memory there."""
