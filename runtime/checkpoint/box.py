"""Boxes of whole numbers: pieces of a tensor by where they begin and end, and what is left of one without another.

without(Box((0, 0), (4, 6)), Box((1, 2), (9, 9))) == [Box((0, 0), (1, 6)), Box((1, 0), (4, 2))]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """The elements from `begin` up to and without `end`, dim by dim; a scalar's has no dims and one element."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def inside(self, other: Box) -> tuple[slice, ...]:
        """Where it lies in an array that holds the other box."""
        edges = zip(self.begin, self.end, other.begin, strict=True)
        return tuple(slice(begin - start, end - start) for begin, end, start in edges)

    def __str__(self) -> str:
        return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(self.begin, self.end, strict=True))}]"


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def common(one: Box, other: Box) -> Box | None:
    """The elements in both; None where there are none."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return Box(begin, end) if all(first < last for first, last in zip(begin, end, strict=True)) else None


def without(box: Box, other: Box) -> list[Box]:
    """Disjoint boxes that together have what is in the first box only."""
    shared = common(box, other)
    if shared is None:
        return [box]
    rest = []
    begin, end = list(box.begin), list(box.end)
    for axis in range(len(begin)):
        if begin[axis] < shared.begin[axis]:
            rest.append(Box(tuple(begin), (*end[:axis], shared.begin[axis], *end[axis + 1 :])))
        if shared.end[axis] < end[axis]:
            rest.append(Box((*begin[:axis], shared.end[axis], *begin[axis + 1 :]), tuple(end)))
        begin[axis], end[axis] = shared.begin[axis], shared.end[axis]
    return rest


def left_of(boxes: Sequence[Box], taken: Iterable[Box]) -> list[Box]:
    """What the taken boxes leave of the first ones, which are disjoint."""
    rest = list(boxes)
    for other in taken:
        if not rest:
            break
        rest = [part for box in rest for part in without(box, other)]
    return rest


def overlap(boxes: Sequence[Box]) -> Box | None:
    """Elements that two of the boxes have in common; None where the boxes are disjoint.

    Boxes are compared in the order in which they begin on the axis that tells most of them apart.
    """
    dims = len(boxes[0].begin) if boxes else 0
    axis = max(range(dims), key=lambda at: len({box.begin[at] for box in boxes}), default=None)
    if axis is None:
        return boxes[0] if len(boxes) > 1 else None
    open_ones: list[Box] = []
    for box in sorted(boxes, key=lambda one: one.begin[axis]):
        open_ones = [one for one in open_ones if one.end[axis] > box.begin[axis]]
        for one in open_ones:
            if (shared := common(one, box)) is not None:
                return shared
        open_ones.append(box)
    return None
