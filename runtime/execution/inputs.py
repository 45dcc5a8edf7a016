"""Inputs that are sharded: a caller gives a rank its shard, or the whole value, of which the runtime takes the shard."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..artifact.boxes import slices
from ..artifact.format import Port


@dataclass(frozen=True)
class Whole:
    """The whole of an input of which a rank reads a shard: the runtime takes the shard out of it.

    A memory-mapped array is read only where the shard is.
    """

    value: object


def shard(port: Port, rank: int, value: object) -> object:
    """A rank's shard of a whole input, in memory of its own; a `Whole` of it where its size does not allow that."""
    box = port.box(rank)
    if box is None:
        return value
    array = np.asarray(value)
    try:
        return np.ascontiguousarray(array[slices(box, array.shape)])
    except ValueError:
        return Whole(value)
