"""Unique names: a name, or where it is taken the first free one of its other spellings.

h, h', h'' ...            `stroked`: a new value next to one of that name
Relu, Relu_1, Relu_2 ...  `numbered`: a repeated name
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, filterfalse


def first_free(
    name: str, is_taken: Callable[[str], object], others: Callable[[str], Iterable[str]] | None = None
) -> str:
    """Returns `name`, or where it is taken the first of its `others` that is not; by default `stroked(name)`.

    One of the others must be free, which is certain if their sequence is endless. `others` is called only where the name is taken.
    """
    return name if not is_taken(name) else next(filterfalse(is_taken, (others or stroked)(name)))


def stroked(name: str) -> Iterator[str]:
    """The name with one stroke, with two and so on."""
    for strokes in count(1):
        yield name + "'" * strokes


def numbered(name: str, mark: str = "_", begin: int = 1) -> Iterator[str]:
    """The name with the mark and each number from `begin` on."""
    for number in count(begin):
        yield f"{name}{mark}{number}"
