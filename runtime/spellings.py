"""Unique names: a name, or where it is taken the first free one of its other spellings; and the names that a misspelt one is like.

h, h', h'' ...            `stroked`: a new value next to one of that name
Relu, Relu_1, Relu_2 ...  `numbered`: a repeated name
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count, filterfalse

_SPECIAL = re.compile(r"\*+|\[[^\]]*\]|[\\?{}]")
"""The parts of a pattern of paths that are not names."""


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


def nearest(text: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Returns up to `n` of the names that are most similar to the text, best first; none with a similarity below one half."""
    wanted = _SPECIAL.sub("", text).lower()
    pairs = {wanted[i : i + 2] for i in range(max(1, len(wanted) - 1))}
    scored = (
        (sum(pair in name.lower() for pair in pairs) / (len(pairs) + abs(len(name) - len(wanted))), -i, name)
        for i, name in enumerate(dict.fromkeys(names))
    )
    least = 0.5 if len(wanted) > 2 else 0.6  # of two letters one is no likeness: 'f1' is not 'l1'
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)
    ranked: list[tuple[float, int, str]] = []
    for _, position, name in heapq.nlargest(50, scored):
        matcher.set_seq1(name.lower())
        ranked.append((matcher.ratio(), position, name))
    return [name for ratio, _, name in heapq.nlargest(n, ranked) if ratio >= least]
