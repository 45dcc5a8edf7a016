"""Cases of two lists that are dealt to each other, where all pairs of them would prove no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def dealt(first: Iterable[A], second: Iterable[B]) -> list[tuple[A, B]]:
    """Pairs in which each of `first` and each of `second` stands, as few as that takes: `dealt("abc", "xy")` is ax, by, cx."""
    one, other = [*first], [*second]
    pairs = zip(itertools.cycle(one), itertools.cycle(other), strict=False)
    return [*itertools.islice(pairs, max(len(one), len(other)))]
