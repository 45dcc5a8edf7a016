"""Shards that go from rank to rank: a message each, one Broadcast, or one Exchange of boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeAlias

from partc.compiler.ir.rank_program import CommOp, Event
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.layout import moves as mv
from partc.compiler.layout.exchange import ExchangeBox, Routes, Span, span_of, within
from partc.compiler.lower.comm import CommLowering, Hop
from partc.compiler.lower.rooted import broadcast, has_size, share_of_shard
from partc.runtime.artifact import format as fmt

Sent: TypeAlias = "tuple[int, Span]"
"""The rank at the other end, and the box in the own shard."""


def exchange(comm: CommLowering, move: mv.Exchange | mv.Transfer, hop: Hop) -> None:
    """Messages where all that is moved are shards as ranks have them, else one Exchange."""
    parts = move.routes.parts()
    given, got = _boxes(move.routes, len(hop.before.layout.cuts))
    full = tuple((Fraction(0), Fraction(1)) for _ in hop.before.layout.cuts)
    if isinstance(move, mv.Transfer) and all(box == full for box in (*given, *got)):
        _messages(comm, parts, hop)
        return
    ranks = tuple(sorted({p.source for p in parts} | {p.target for p in parts}))
    group = comm.group((ranks,))
    amount = comm.amount(hop.after.value, max(mv.received(move), default=Fraction(0)))
    tag = comm.event(fmt.EXCHANGE, hop, (ranks,), group, amount)
    leaving = _grouped((p.source, (p.target, box)) for p, box in zip(parts, given, strict=True))
    coming = _grouped((p.target, (p.source, box)) for p, box in zip(parts, got, strict=True))
    for rank in ranks:
        sends, receives = leaving.get(rank, []), coming.get(rank, [])
        attributes: dict[str, int | str | tuple[int, ...]] = {
            fmt.GROUP: group,
            fmt.SEND_PEERS: tuple(peer for peer, _ in sends),
            fmt.SEND_BOXES: _numbers([box for _, box in sends]),
            fmt.RECV_PEERS: tuple(peer for peer, _ in receives),
            fmt.RECV_BOXES: _numbers([box for _, box in receives]),
            fmt.RANK: len(full),
        }
        inputs, outputs = ((hop.name,) if sends else ()), ((hop.out,) if receives else ())
        step = CommOp(fmt.EXCHANGE, inputs, outputs, attributes, tag, hop.after.value, hop.cause, amount)
        comm.append((rank,), step)


def _messages(comm: CommLowering, parts: Sequence[ExchangeBox], hop: Hop) -> None:
    """A rank's shard to others as it is: a Broadcast of one rank to several, else messages."""
    apart = [part for part in parts if part.source != part.target]
    if len(apart) > 1 and len({part.source for part in apart}) == 1 and has_size(comm.values[hop.after.value]):
        comm.identity_on(tuple(part.source for part in parts if part.source == part.target), hop.name, hop.out)
        broadcast(comm, (apart[0].source, *(part.target for part in apart)), hop)
        return
    for part in parts:
        if part.source == part.target:
            comm.identity_on((part.source,), hop.name, hop.out)
        else:
            _message(comm, part.source, part.target, hop)


def _message(comm: CommLowering, source: int, target: int, hop: Hop) -> None:
    """One message. Both ends use one name for the value; where the target has that name already, an Identity renames it behind the Recv."""
    shape, value, way = comm.values.local_shape(hop.after), hop.after.value, hop.name
    amount = comm.amount(value, share_of_shard(hop.after.layout))
    has_it = any(hop.name in builder.types for builder in comm.builders.of((target,)))
    if hop.name != hop.out and (has_it or _will_have(comm, target, hop.name, hop.after)):
        way = comm.builders.free((source, target), f"{hop.name}.to.{target}")
        comm.identity_on((source,), hop.name, way)
        comm.builders.declare((source,), way, hop.before.value, shape)
    if way != hop.out:
        comm.builders.declare((target,), way, value, shape)
    tag, cause = len(comm.events), hop.cause
    comm.events.append(Event(tag, fmt.SEND, value, way, ((source,), (target,)), "", shape, amount, cause, hop.derived))
    comm.append((source,), CommOp(fmt.SEND, (way,), (), {fmt.PEER: target}, tag, value, cause, amount))
    comm.append((target,), CommOp(fmt.RECV, (), (way,), {fmt.PEER: source}, tag, value, cause, amount))
    comm.identity_on((target,), way, hop.out)


def _will_have(comm: CommLowering, rank: int, name: str, version: ShardedValue) -> bool:
    """Whether another version of the value has a name on a rank."""
    others = (one for one in comm.values.versions(version.value) if one != version)
    return any(comm.values.names[one] == name and rank in one.group for one in others)


def _boxes(routes: Routes, dims: int) -> tuple[list[Span], list[Span]]:
    """Per part that is moved: its box within the source rank's shard, and within the target rank's shard."""
    source_span = {rank: span_of(routes.before, k) for k, rank in enumerate(routes.source_group)}
    target_span = {rank: span_of(routes.after, k) for k, rank in enumerate(routes.target_group)}
    parts = routes.parts()
    given = [within(part.span[:dims], source_span[part.source]) for part in parts]
    return given, [within(part.span[:dims], target_span[part.target]) for part in parts]


def _grouped(pairs: Iterable[tuple[int, Sent]]) -> dict[int, list[Sent]]:
    found: dict[int, list[Sent]] = {}
    for rank, sent in pairs:
        found.setdefault(rank, []).append(sent)
    return found


def _numbers(boxes: Sequence[Span]) -> tuple[int, ...]:
    """Boxes as integers: per dim begin numerator, end numerator, denominator."""
    found: list[int] = []
    for box in boxes:
        for begin, end in box:
            bottom = math.lcm(begin.denominator, end.denominator)
            found += [int(begin * bottom), int(end * bottom), bottom]
    return tuple(found)
