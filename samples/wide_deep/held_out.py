"""Records of the same kind as `clicks.py` makes, that no training sees."""

from clicks import Clicks


def source() -> Clicks:
    return Clicks(2048, seed=2)
