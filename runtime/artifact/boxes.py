"""Inputs and outputs that are cut: which shard of the whole a rank has, and the whole from all shards.

A box says for each dim `[begin, end, denominator]`: the rank has the part of the dim from begin/denominator to end/denominator.

    local([[1, 2, 4], [0, 1, 1]], (8, 3)) == (slice(2, 4), slice(0, 3))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import numpy as np

from .dtypes import Array
from .format import Box, Grid, Port


@dataclass(frozen=True)
class Whole:
    """The whole of an input where a rank reads a shard: the runtime takes the shard out of it.

    A memory-mapped array is read only where the shard is.
    """

    value: object


def local(box: Box, shape: Sequence[int]) -> tuple[slice, ...]:
    """The part of a whole of `shape` that a box means; ValueError where its edges are not whole numbers."""
    found = []
    for axis, ((begin, end, denominator), size) in enumerate(zip(box, shape, strict=True)):
        if size * begin % denominator or size * end % denominator:
            raise ValueError(
                f"axis {axis} of {size} has no whole part from {begin}/{denominator} to {end}/{denominator}"
            )
        found.append(slice(size * begin // denominator, size * end // denominator))
    return tuple(found)


def whole_size(size: int, cut: Sequence[int]) -> int:
    """The size of a whole dim of which a shard has `size`; ValueError where it would be no whole number."""
    begin, end, denominator = cut
    found = Fraction(size * denominator, end - begin)
    if found.denominator != 1:
        raise ValueError(f"{size} is not {end - begin}/{denominator} of a whole number")
    return int(found)


def divisor(boxes: Iterable[Box], axis: int) -> int:
    """The number that the size of an axis must be divisible by, so that all boxes have whole edges."""
    if isinstance(boxes, Grid):
        return boxes.divisor(axis)
    edges = {Fraction(edge, box[axis][2]) for box in boxes for edge in box[axis][:2]}
    return math.lcm(*(edge.denominator for edge in edges))


def shard(port: Port, rank: int, value: object) -> object:
    """What a rank reads of the whole of an input, in memory of its own; a `Whole` of it where it cannot be cut."""
    box = port.box(rank)
    if box is None:
        return value
    array = np.asarray(value)
    try:
        return np.ascontiguousarray(array[local(box, array.shape)])
    except ValueError:
        return Whole(value)


def merge(boxes: Sequence[Box], shards: Sequence[Array]) -> Array:
    """The whole of which these are the shards, as `distinct` chooses them."""
    first = shards[0]
    shape = tuple(whole_size(size, cut) for size, cut in zip(first.shape, boxes[0], strict=True))
    made = np.empty(shape, first.dtype)
    for box, part in zip(boxes, shards, strict=True):
        made[local(box, shape)] = part
    return cast(Array, made)


def distinct(port: Port) -> list[tuple[int, Box]]:
    """The ranks that together have all of a cut output, each with its box: the first of those that have the same."""
    found: dict[tuple[tuple[int, ...], ...], tuple[int, Box]] = {}
    for rank, box in zip(port.ranks, port.boxes or [], strict=True):
        found.setdefault(tuple(tuple(cut) for cut in box), (rank, box))
    return list(found.values())
