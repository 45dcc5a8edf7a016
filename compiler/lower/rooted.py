"""Collectives with a root: a Reduce, which one rank of each list gets, and a Broadcast of what one rank has whole."""

from __future__ import annotations

import math
from fractions import Fraction

from partc.compiler.ir.rank_program import CommOp
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.layout import moves as mv
from partc.compiler.layout.layout import Layout
from partc.compiler.lower.comm import CommLowering, Hop
from partc.runtime.artifact import format as fmt


def reduce_to(comm: CommLowering, move: mv.Reduce, hop: Hop) -> None:
    """A Reduce: all ranks give their terms, the roots have the sum."""
    sets, group = comm.subgroups(move.before.mesh, move.axes, move.source_group)
    value, amount = hop.after.value, comm.amount(hop.after.value, share_of_shard(hop.after.layout))
    tag = comm.event(fmt.REDUCE_TO, hop, sets, group, amount)
    said: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group, fmt.ROOT: move.root, fmt.REDUCE: move.reduce}
    others = tuple(rank for rank in move.source_group if rank not in move.group)
    for ranks, made in ((others, ()), (move.group, (hop.out,))):
        comm.append(ranks, CommOp(fmt.REDUCE_TO, (hop.name,), made, said, tag, value, hop.cause, amount))


def broadcast(comm: CommLowering, ranks: Group, hop: Hop) -> None:
    """A Broadcast of the value that the first of the ranks has whole; it keeps its own, and the others get it."""
    group, value = comm.group((ranks,)), hop.after.value
    amount = comm.amount(value, share_of_shard(hop.before.layout))
    tag = comm.event(fmt.BROADCAST, hop, (ranks,), group, amount)
    said: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group, fmt.ROOT: 0}
    for some, given, made in ((ranks[:1], (hop.name,), ()), (ranks[1:], (), (hop.out,))):
        comm.append(some, CommOp(fmt.BROADCAST, given, made, said, tag, value, hop.cause, amount))


def has_size(info: ValueInfo) -> bool:
    """Whether a value is a tensor of numbers whose shape the symbols tell."""
    return info.is_tensor and info.shape is not None and info.item_bytes is not None


def share_of_shard(layout: Layout) -> Fraction:
    """The share of a value that one rank has."""
    return Fraction(1, math.prod(layout.shards))
