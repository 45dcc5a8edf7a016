"""Names that nothing else has: a name, or where that is taken the first free one of its other spellings.

h, h', h'' ...            `stroked`: beside a value that is called so
Relu, Relu_1, Relu_2 ...  `numbered`: what comes again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, filterfalse


def first_free(
    name: str, is_taken: Callable[[str], object], others: Callable[[str], Iterable[str]] | None = None
) -> str:
    """`name`, or where that is taken the first of its `others` that is not; by default these have strokes.

    One of the others must be free, as there is where they have no end. They are asked for only where the name is taken.
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
