"""Folded order: a dim is cut into 2p chunks, and rank r of p has chunks r and 2p-1-r; the compiler and the checker share it."""


def chunks(ranks: int) -> list[int]:
    """Returns the natural place of each chunk in folded order: `[0, 3, 1, 2]` for two ranks."""
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
