"""Collectives with a root: a Reduce, which one rank of each list gets, and a Broadcast of what one rank has whole."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.ir.program import CommOp, Event, Group, Program, ShardedValue
from partc.compiler.layout import moves as mv
from partc.compiler.layout.layout import Layout
from partc.compiler.tasks.localize import local_shape
from partc.runtime.artifact import format as fmt

if TYPE_CHECKING:
    from partc.compiler.lower.comm import CommLowering


def reduce_to(
    writer: CommLowering, move: mv.Reduce, before: ShardedValue, after: ShardedValue, name: str, out: str, cause: str
) -> None:
    """A Reduce: all ranks give their terms, the roots have what comes of them."""
    sets, group = writer.circles(move.before.mesh, move.axes, move.source_group)
    amount, shape = writer.amount(after.value, share_of_shard(after.layout)), local_shape(writer.program, before)
    tag = len(writer.events)
    way = (before.group, before.layout), (after.group, after.layout)
    event = Event(tag, fmt.REDUCE_TO, after.value, out, sets, group, shape, amount, cause, writer.derived, way)
    writer.events.append(event)
    said: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group, fmt.ROOT: move.root, fmt.REDUCE: move.reduce}
    others = tuple(rank for rank in move.source_group if rank not in move.group)
    for ranks, made in ((others, ()), (move.group, (out,))):
        writer.append(ranks, CommOp(fmt.REDUCE_TO, (name,), made, said, tag, after.value, cause, amount))


def broadcast(
    writer: CommLowering, ranks: Group, before: ShardedValue, after: ShardedValue, name: str, out: str, cause: str
) -> None:
    """A Broadcast of what the first of the ranks has whole; it keeps what it has, and the others get it."""
    group, shape = writer.group((ranks,)), local_shape(writer.program, before)
    amount = writer.amount(after.value, share_of_shard(before.layout))
    tag = len(writer.events)
    way = (before.group, before.layout), (after.group, after.layout)
    event = Event(tag, fmt.BROADCAST, after.value, out, (ranks,), group, shape, amount, cause, writer.derived, way)
    writer.events.append(event)
    said: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group, fmt.ROOT: 0}
    for some, given, made in ((ranks[:1], (name,), ()), (ranks[1:], (), (out,))):
        writer.append(some, CommOp(fmt.BROADCAST, given, made, said, tag, after.value, cause, amount))


def has_size(program: Program, value: ir.Value) -> bool:
    """Whether a value is a tensor of numbers whose shape the symbols tell."""
    info = program.values[value]
    return info.is_tensor and info.shape is not None and info.item_bytes is not None


def share_of_shard(layout: Layout) -> Fraction:
    """The share of a value that one rank has."""
    return Fraction(1, math.prod(layout.num_shards(dim) for dim in range(len(layout.cuts))))
