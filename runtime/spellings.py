"""Names that nothing else has: a name, or where that is taken the first free one of its other spellings.

h, h', h'' ...            `stroked`: beside a value that is called so
Relu, Relu_1, Relu_2 ...  `counted`: what comes again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, filterfalse


def first_free(name: str, is_taken: Callable[[str], object], others: Iterable[str] | None = None) -> str:
    """`name`, or where that is taken the first of the `others` that is not; by default these have strokes.

    One of the others must be free, as there is where they have no end. They are spelled only where they are asked for.
    """
    if not is_taken(name):
        return name
    return next(filterfalse(is_taken, stroked(name) if others is None else others))


def stroked(name: str) -> Iterator[str]:
    """The name with one stroke, with two and so on."""
    for strokes in count(1):
        yield name + "'" * strokes


def counted(stem: str, begin: int = 1) -> Iterator[str]:
    """The stem with each number from `begin` on."""
    for number in count(begin):
        yield f"{stem}{number}"
