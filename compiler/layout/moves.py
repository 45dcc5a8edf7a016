"""The steps of a reshard, as data: the effect of each on every rank, the layout after it, and its bytes.

A step's `axes` are axes of the mesh of `after`; ranks that differ only in these take part together, in the order that `Layout.groups` gives
them. Axes are added to and removed from the minor end of a dim:

    AllReduce      shards stay                   Partial over axes -> Replicate
    ReduceScatter  dim (a,)    -> (a, *axes)     Partial over axes -> Shard: a rank gets the shard of its place, reduced
    AllGather      dim (a, *axes) -> (a,)        the shards joined along dim, in the group's order
    AllToAll       concat_dim (a, *axes) -> (a,), split_dim (b,) -> (b, *axes): each splits along split_dim, sends the i-th
                   part to the i-th rank, and joins the received parts along concat_dim
    Slice          dim (a,)    -> (a, *axes)     local: the shard of the rank's place of a replicated value
    ZeroPad        dim (a, *axes) -> (a,)        local: the own shard at its place, zeros elsewhere: Partial(sum) over axes
    MaskReplicas   shards stay                   local: Replicate -> Partial over axes. sum: zeros but where all coordinates
                   along axes are 0; max and min: nothing to do
    Exchange       any shards to any others within a group, with the messages of `Routes`
    Transfer       the same from one group to another
    Reduce         Partial over axes -> the axes are removed: of ranks that differ along them, the one of place `root` gets the
                   reduction; the axes are those of the mesh before

Bytes are those that a rank receives, as fractions of the global value, where a collective of p ranks moves the least possible: all_reduce
2(p-1)/p of the rank's own bytes, reduce_scatter and all_to_all (p-1)/p of them, all_gather p-1 times them, reduce all of them on the root,
and as many on p-2 others together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.layout.exchange import Routes
from partc.compiler.layout.layout import Layout


@dataclass(frozen=True)
class _Step:
    group: tuple[int, ...]
    """The ranks that hold the value after the step."""
    after: Layout


@dataclass(frozen=True)
class AllReduce(_Step):
    axes: tuple[int, ...]
    reduce: str


@dataclass(frozen=True)
class ReduceScatter(_Step):
    dim: int
    axes: tuple[int, ...]
    reduce: str


@dataclass(frozen=True)
class AllGather(_Step):
    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class AllToAll(_Step):
    split_dim: int
    concat_dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Slice(_Step):
    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class ZeroPad(_Step):
    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class MaskReplicas(_Step):
    axes: tuple[int, ...]
    reduce: str


@dataclass(frozen=True)
class Exchange(_Step):
    before: Layout

    @property
    def routes(self) -> Routes:
        """The boxes that the ranks send each other."""
        return Routes(self.before, self.after, self.group, self.group)


@dataclass(frozen=True)
class Transfer(_Step):
    before: Layout
    source_group: tuple[int, ...]

    @property
    def routes(self) -> Routes:
        """The boxes that the source group sends to the target group."""
        return Routes(self.before, self.after, self.source_group, self.group)


@dataclass(frozen=True)
class Reduce(_Step):
    before: Layout
    source_group: tuple[int, ...]
    axes: tuple[int, ...]
    reduce: str
    root: int

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that reduce together."""
        return tuple(tuple(self.source_group[index] for index in one) for one in self.before.groups(self.axes))


Move: TypeAlias = (
    AllReduce | ReduceScatter | AllGather | AllToAll | Slice | ZeroPad | MaskReplicas | Exchange | Transfer | Reduce
)


@dataclass(frozen=True)
class Traffic:
    """Received bytes as fractions of the global value: the maximum over ranks, and the total."""

    most: Fraction
    total: Fraction


def is_local(move: Move) -> bool:
    """Whether no rank needs data from another rank."""
    match move:
        case Slice() | ZeroPad() | MaskReplicas():
            return True
        case Exchange() | Transfer():
            return not any(move.routes.received())
        case _:
            return False


def takers(move: Move) -> tuple[int, ...]:
    """The ranks to which the results of `received` refer: those that hold the value after the step; for a Reduce, all that take part."""
    return move.source_group if isinstance(move, Reduce) else move.group


def received(move: Move) -> tuple[Fraction, ...]:
    """For each rank of `takers`, the share of the global value that it receives."""
    match move:
        case Exchange() | Transfer():
            return move.routes.received()
        case Reduce():
            local, count, roots = _local(move), len(move.sets[0]), {*move.group}
            others = local * (count - 2) / (count - 1)
            return tuple([local if rank in roots else others for rank in takers(move)])
        case _:
            return (_each(move),) * len(move.group)


def _each(move: Move) -> Fraction:
    """The share of the global value that each rank receives in a step that is the same for all ranks."""
    match move:
        case AllReduce(axes=axes):
            return 2 * _local(move) * (1 - Fraction(1, _ranks(move.after, axes)))
        case ReduceScatter(axes=axes):
            return _local(move) * (_ranks(move.after, axes) - 1)
        case AllGather(axes=axes) | AllToAll(axes=axes):
            return _local(move) * (1 - Fraction(1, _ranks(move.after, axes)))
        case _:
            return Fraction(0)


def _local(move: Move) -> Fraction:
    return Fraction(1, math.prod(move.after.shards))


def bytes_moved(moves: Sequence[Move]) -> Traffic:
    """The bytes that all steps together move: the maximum over ranks, and the total."""
    alike = not any(isinstance(move, Exchange | Transfer | Reduce) for move in moves)
    if moves and alike and all(move.group == moves[0].group for move in moves):
        share = sum(map(_each, moves), Fraction(0))
        return Traffic(share, share * len(moves[0].group))
    each: dict[int, Fraction] = {}
    for move in moves:
        for rank, share in zip(takers(move), received(move), strict=True):
            if share:
                each[rank] = each.get(rank, Fraction(0)) + share
    shares = Counter(each.values())  # of thousands of ranks most receive as much
    return Traffic(max(shares, default=Fraction(0)), sum([one * count for one, count in shares.items()], Fraction(0)))


def share_of(share: Fraction, whole: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """A fraction of a number of bytes: `Fraction(3, 4)` of `3456*batch` is `2592*batch`; for an integer, rounded up."""
    if isinstance(whole, int):
        return math.ceil(whole * share)
    if share.denominator == 1:
        return whole * share.numerator
    return whole * share.numerator / share.denominator


def _ranks(layout: Layout, axes: tuple[int, ...]) -> int:
    return math.prod(layout.mesh[axis] for axis in axes)
