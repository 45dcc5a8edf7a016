"""Boxes: parts of tensors, as fractions of their dims and as ranges of elements.

A `Box` has for each dim `[begin, end, denominator]`: the part of the dim from begin/denominator to end/denominator, whatever its size.
A `Region` is the range of elements that a box covers in a tensor of a known shape:

    region([[1, 2, 4], [0, 1, 1]], (8, 3)) == Region((2, 0), (4, 3))
    difference(Region((0, 0), (4, 6)), Region((1, 2), (9, 9))) == [Region((0, 0), (1, 6)), Region((1, 0), (4, 2))]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from partc.runtime.artifact.ranks import Box, Grid
from partc.runtime.artifact.tensors.dtypes import Array

if TYPE_CHECKING:
    from partc.runtime.artifact.format import Port

Edges: TypeAlias = Sequence[Sequence[int]]
"""A box in a list or in tuples: for each dim begin, end and denominator."""


@dataclass(frozen=True, order=True)
class Region:
    """The elements from `begin` to `end`, exclusive, along each dim; the region of a scalar has no dims and one element."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each dim."""
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the region in an array of the global tensor."""
        return tuple(slice(begin, end) for begin, end in zip(self.begin, self.end, strict=True))

    def inside(self, other: Region) -> tuple[slice, ...]:
        """The index of the region in an array of the other region."""
        edges = zip(self.begin, self.end, other.begin, strict=True)
        return tuple(slice(begin - start, end - start) for begin, end, start in edges)

    def contains(self, other: Region) -> bool:
        """Whether all elements of the other region are in this one."""
        sides = zip(self.begin, other.begin, other.end, self.end, strict=True)
        return all(first <= begin and end <= last for first, begin, end, last in sides)

    def __str__(self) -> str:
        return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(self.begin, self.end, strict=True))}]"


def full_region(shape: Sequence[int]) -> Region:
    """The region of all elements of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def region(box: Edges, shape: Sequence[int]) -> Region:
    """The elements that a box covers in a tensor of `shape`; ValueError where its edges are not integers."""
    if len(box) != len(shape):
        raise ValueError(f"a box of {len(box)} dims in a value of {len(shape)}")
    begins, ends = [], []
    for axis, ((begin, end, of), size) in enumerate(zip(box, shape, strict=True)):
        first, last = size * begin, size * end
        if first % of or last % of:
            raise ValueError(f"axis {axis} of {size} has no element edges at {begin}/{of} and {end}/{of}")
        begins.append(first // of)
        ends.append(last // of)
    return Region(tuple(begins), tuple(ends))


def slices(box: Edges, shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in an array of `shape`; ValueError where its edges are not integers.

    slices([[1, 2, 4], [0, 1, 1]], (8, 3)) == (slice(2, 4), slice(0, 3))
    """
    return region(box, shape).slices


def intersection(one: Region, other: Region) -> Region | None:
    """The elements in both regions; None where there are none."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return Region(begin, end) if all(first < last for first, last in zip(begin, end, strict=True)) else None


def difference(whole: Region, other: Region) -> list[Region]:
    """Disjoint regions that together have the elements of the first region that are not in the other."""
    shared = intersection(whole, other)
    if shared is None:
        return [whole]
    rest = []
    begin, end = list(whole.begin), list(whole.end)
    for axis in range(len(begin)):
        if begin[axis] < shared.begin[axis]:
            rest.append(Region(tuple(begin), (*end[:axis], shared.begin[axis], *end[axis + 1 :])))
        if shared.end[axis] < end[axis]:
            rest.append(Region((*begin[:axis], shared.end[axis], *begin[axis + 1 :]), tuple(end)))
        begin[axis], end[axis] = shared.begin[axis], shared.end[axis]
    return rest


def remaining(regions: Sequence[Region], taken: Iterable[Region]) -> list[Region]:
    """Returns disjoint regions of the elements that are in `regions`, which are disjoint, but in none of the `taken` regions."""
    rest = list(regions)
    for other in taken:
        if not rest:
            break
        rest = [part for one in rest for part in difference(one, other)]
    return rest


def overlapping(regions: Sequence[Region]) -> tuple[int, int] | None:
    """The indices of two of the regions that have elements in common; None where the regions are disjoint.

    Regions are compared in the order of their begins along one axis: the axis with the most different begins.
    """
    dims = len(regions[0].begin) if regions else 0
    axis = max(range(dims), key=lambda at: len({one.begin[at] for one in regions}), default=None)
    if axis is None:
        return (0, 1) if len(regions) > 1 else None
    open_ones: list[int] = []
    for at in sorted(range(len(regions)), key=lambda each: regions[each].begin[axis]):
        open_ones = [other for other in open_ones if regions[other].end[axis] > regions[at].begin[axis]]
        for other in open_ones:
            if intersection(regions[other], regions[at]) is not None:
                return min(at, other), max(at, other)
        open_ones.append(at)
    return None


def overlap(regions: Sequence[Region]) -> Region | None:
    """Elements that two of the regions have in common; None where the regions are disjoint."""
    found = overlapping(regions)
    return None if found is None else intersection(regions[found[0]], regions[found[1]])


def unsharded_extent(size: int, cut: Sequence[int]) -> int:
    """The full size of a dim whose part `cut`, `[begin, end, denominator]`, has `size` elements; ValueError where it is not an integer."""
    begin, end, denominator = cut
    found = Fraction(size * denominator, end - begin)
    if found.denominator != 1:
        raise ValueError(f"{size} is not {end - begin}/{denominator} of a whole number")
    return int(found)


def divisor(boxes: Iterable[Box], axis: int) -> int:
    """The number by which the size of an axis must be divisible for the edges of all boxes to be integers."""
    if isinstance(boxes, Grid):
        return boxes.divisor(axis)
    edges = {Fraction(edge, box[axis][2]) for box in boxes for edge in box[axis][:2]}
    return math.lcm(*(edge.denominator for edge in edges))


def merge(boxes: Sequence[Edges], shards: Sequence[Array]) -> Array:
    """Returns the tensor that consists of these shards, one for each of `boxes`, which together cover it."""
    first = shards[0]
    shape = tuple(unsharded_extent(size, cut) for size, cut in zip(first.shape, boxes[0], strict=True))
    made = np.empty(shape, first.dtype)
    for box, part in zip(boxes, shards, strict=True):
        made[slices(box, shape)] = part
    return cast(Array, made)


def distinct(port: Port) -> list[tuple[int, Box]]:
    """Returns ranks that together have all of a sharded output, each with its box: for each distinct box the first rank that has it."""
    found: dict[tuple[tuple[int, ...], ...], tuple[int, Box]] = {}
    for rank, box in zip(port.ranks, port.boxes or [], strict=True):
        found.setdefault(tuple(tuple(cut) for cut in box), (rank, box))
    return list(found.values())
