"""The shards of one tensor over ranks: the number of shards of each dim, and the ranks that have each shard.

The law between the standard's words and a layout on a mesh. Written: the dims that are cut, rising, each with its number of
shards; the shards row-major over these dims; a shard of one rank is that device, one of several a negative key of a group.
Read: the index of a rank's shard in each dim is a mixed-radix number over some axes of a mesh; the axes are found by the
step that each makes. `[2, 1]` of x on 4 ranks, mesh (2, 2), rows cut over axis 0:

    device [-1, -2], groups {-1: [0, 1], -2: [2, 3]}, axis 0 in 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import onnx_ir as ir
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, Mesh, primes


@dataclass(frozen=True)
class Spread:
    """Per dim the number of shards; per shard, row-major, the ranks that hold it.

    `holders` is empty where the annotation names no devices.
    """

    shards: tuple[int, ...]
    holders: tuple[Group, ...] = ()

    @property
    def ranks(self) -> Group:
        """All ranks that hold a shard, rising."""
        return tuple(sorted(rank for holders in self.holders for rank in holders))

    @property
    def listed(self) -> Group:
        """All ranks in the order of the shards."""
        return tuple(rank for holders in self.holders for rank in holders)

    @property
    def count(self) -> int:
        """The number of shards."""
        return math.prod(self.shards)

    def over(self, group: Group) -> Spread:
        """The spread with devices: its own, else the group's ranks shard by shard, neighbouring ranks being replicas."""
        if self.holders:
            return self
        each = len(group) // self.count
        return Spread(self.shards, tuple(group[k * each : (k + 1) * each] for k in range(self.count)))


@lru_cache(maxsize=4096)
def spread_of(layout: Layout, group: Group) -> Spread:
    """How a layout spreads a value over a group; partial values count as replicas."""
    shards = layout.shards
    holders: list[list[int]] = [[] for _ in range(math.prod(shards))]
    for index, rank in enumerate(group):
        number = 0
        for count, at in zip(shards, layout.shard(index), strict=True):
            number = number * count + at
        holders[number].append(rank)
    return Spread(shards, tuple(tuple(each) for each in holders))


def spec_of(value: ir.Value, spread: Spread) -> ir.ShardingSpec:
    """The ONNX sharding spec of a spread value."""
    device, groups = _devices(spread)
    dims = value.shape.dims if value.shape is not None else (None,) * len(spread.shards)
    sharded = tuple(
        ir.ShardedDim(axis, (ir.SimpleShardedDim(ir.SymbolicDim(None) if dim is None else dim, count),))
        for axis, (dim, count) in enumerate(zip(dims, spread.shards, strict=False))
        if count > 1
    )
    return ir.ShardingSpec(value, device, groups, sharded)


@lru_cache(maxsize=4096)
def _devices(spread: Spread) -> tuple[Group, tuple[ir.IndexToDeviceGroupMapEntry, ...]]:
    if all(len(ranks) == 1 for ranks in spread.holders):
        return spread.listed, ()
    keys = tuple(-1 - k for k in range(len(spread.holders)))
    entries = zip(keys, spread.holders, strict=True)
    return keys, tuple(ir.IndexToDeviceGroupMapEntry(key, ranks) for key, ranks in entries)


@lru_cache(maxsize=4096)
def layout_on(mesh: Mesh, spread: Spread, group: Group) -> Layout | None:
    """The layout on `mesh` that spreads a value so; None if the mesh's axes cannot."""
    at = {rank: number for number, ranks in enumerate(spread.holders) for rank in ranks}
    whole = Layout(mesh, ())
    # by axis the rank whose only coordinate is 1 along it; 0 for an axis of size 1
    units = [math.prod(mesh[axis + 1 :]) if mesh[axis] > 1 else 0 for axis in range(len(mesh))]
    cuts: list[tuple[int, ...]] = []
    numbers = [at[rank] for rank in group]
    below = spread.count
    used: list[int] = []
    for count in spread.shards:
        above, below = below, below // count
        indexes = [number % above // below for number in numbers]
        axes = sorted((axis for axis in range(len(mesh)) if indexes[units[axis]]), key=lambda k: -indexes[units[k]])
        used += axes
        cut = tuple(axes)
        if math.prod(mesh[axis] for axis in cut) != count or len(used) != len(set(used)):
            return None
        for index, have in enumerate(indexes):
            number = 0
            coordinates = whole.coordinates(index)
            for axis in cut:
                number = number * mesh[axis] + coordinates[axis]
            if number != have:
                return None
        cuts.append(cut)
    return Layout(mesh, tuple(cuts))


def any_layout(spread: Spread, group: Group) -> Layout | None:
    """The layout on the first of the group's prime meshes that can; None where none can."""
    return next((found for mesh in meshes(len(group)) if (found := layout_on(mesh, spread, group))), None)


@lru_cache(maxsize=256)
def meshes(size: int) -> tuple[Mesh, ...]:
    """All meshes of so many ranks whose axes are primes, the rising one first."""
    return tuple(_orders(primes(size)))


def _orders(sizes: Sequence[int]) -> Iterator[Mesh]:
    if not sizes:
        yield ()
    for first in dict.fromkeys(sizes):
        rest = list(sizes)
        rest.remove(first)
        yield from ((first, *others) for others in _orders(rest))


def fused_shards(entries: Sequence[tuple[int | None, int]]) -> int | None:
    """Into how many equal runs a dim is cut that was fused of parts (size, shards), outer first; None where the shards are not runs.

    Shards are runs where every part outside of the last one that is cut is cut into single elements.
    """
    last = max((k for k, (_, count) in enumerate(entries) if count > 1), default=-1)
    if any(size != count for size, count in itertools.islice(entries, max(last, 0))):
        return None
    return math.prod(count for _, count in entries)
