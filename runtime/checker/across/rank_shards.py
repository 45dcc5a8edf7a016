"""A layout of the manifest, resolved for each rank: the rank's shard as fractions of the dims, and the index of its partial value.

mesh [2], cuts [[0], []] on ranks 4 and 5    rank 4 has [0 to 1/2, 0 to 1], rank 5 [1/2 to 1, 0 to 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from partc.runtime.artifact.format import LayoutRecord
from partc.runtime.artifact.ranks import ranks_of

Span = tuple[Fraction, Fraction]
Shard = tuple[Span, ...]


@dataclass(frozen=True)
class RankShard:
    """The shard of a value on a rank, and the index of the rank's partial value."""

    shard: Shard
    term: int


@dataclass(frozen=True)
class ShardLayout:
    """The shard of each rank, the number of partial values (`terms`), and the reductions that combine them."""

    shards: Mapping[int, RankShard]
    terms: int
    reductions: frozenset[str]


def layout_of(record: LayoutRecord, known: dict[str, ShardLayout]) -> ShardLayout:
    """Resolves a layout for each of its ranks; ValueError where its mesh does not fit the number of ranks. `known` caches the results."""
    key = record.model_dump_json()
    if key not in known:
        ranks = ranks_of(record.ranks)
        if prod(record.mesh) != len(ranks):
            raise ValueError(f"a grid of {record.mesh} is not one of {len(ranks)} ranks")
        axes = [axis for axis, _ in record.partial]
        held = {}
        for index, rank in enumerate(ranks):
            at = _coordinates(index, record.mesh)
            shard = []
            for cut in record.cuts:
                count, number = prod(record.mesh[axis] for axis in cut), _number(at, record.mesh, cut)
                shard.append((Fraction(number, count), Fraction(number + 1, count)))
            held[rank] = RankShard(tuple(shard), _number(at, record.mesh, axes))
        terms = prod(record.mesh[axis] for axis in axes)
        known[key] = ShardLayout(held, terms, frozenset(word for axis, word in record.partial if record.mesh[axis] > 1))
    return known[key]


def _coordinates(index: int, mesh: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(mesh):
        index, coordinate = divmod(index, size)
        found.append(coordinate)
    return found[::-1]


def _number(at: Sequence[int], mesh: Sequence[int], axes: Sequence[int]) -> int:
    number = 0
    for axis in axes:
        number = number * mesh[axis] + at[axis]
    return number
