"""A reshard in ranks' programs: its moves (`layout/reshard.py`) as messages, collectives and local nodes.

h on 0-3 [2, 1]  -->  h on 0-3 [1, 1]      every rank   %h = AllGather(%h@[2, 1])
h on 0           -->  h on 1               rank 0       Send(%h, 1)          rank 1   %h = Recv(0)

Moves without communication: a slice of a replicated value, a replicated or sharded value as a partial sum with zeros.

All ranks do the same; which shard is a rank's own is a constant by its place, so that they share one program.

Shards that go from rank to rank: a message each, one Broadcast or Reduce, which have a root, or one Exchange of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeAlias

from partc.compiler.ir.constants import RankConstant
from partc.compiler.ir.programs import Comm, Event, Value
from partc.compiler.ir.sharded import Group, ShardedValue, ranks_of
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.layout import moves as mv
from partc.compiler.layout.exchange import ExchangeBox, Routes, Span, span_of, within
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.reshard import lower, lower_unknown
from partc.compiler.lower.comm import Attributes, CommLowering, Hop, computed
from partc.compiler.lower.job import Transfer
from partc.compiler.sharding.values.operands import divisors
from partc.runtime.artifact import format as fmt


def slice_out(comm: CommLowering, move: mv.Slice, hop: Hop) -> None:
    """Slices the shard of each rank's place; bounds are constants where the size is fixed, else computed from the extent."""
    shape, source, out, dim = comm.values.local_shape(hop.before), hop.source, hop.out, move.dim
    size = shape[dim] if shape is not None else None
    shards = math.prod(move.after.mesh[axis] for axis in move.axes)
    ranks, (_, group) = move.group, comm.subgroups(move.after.mesh, move.axes, move.group)
    axis = comm.constant(ranks, out, "axis", [dim])
    if isinstance(size, int):
        length = size // shards
        begin = comm.constant(ranks, out, "begin", RankConstant.of(group, [f"{length}*place"]))
        end = comm.constant(ranks, out, "end", RankConstant.of(group, [f"{length}*place + {length}"]))
    else:
        extent = comm.derived_op(ranks, "Shape", [source], out, "shape")
        extent = comm.derived_op(ranks, "Gather", [extent, axis], out, "extent")
        count = comm.constant(ranks, out, "shards", [shards])
        step = comm.derived_op(ranks, "Div", [extent, count], out, "length")
        shard = comm.constant(ranks, out, "shard", RankConstant.of(group, ["place"]))
        begin = comm.derived_op(ranks, "Mul", [step, shard], out, "begin")
        end = comm.derived_op(ranks, "Add", [begin, step], out, "end")
    sliced = computed("Slice", [source, begin, end, axis], [out], Value(".slice", out), hop.after.value.producer())
    sliced.node.metadata_props[fmt.ORDER] = fmt.KEPT_ORDER
    comm.append(ranks, sliced)


def keep(comm: CommLowering, move: mv.MaskReplicas, hop: Hop) -> None:
    """A replicated value as a partial sum: the value on the first rank along the axes, zeros on the others."""
    if move.reduce != "sum":
        comm.identity_on(move.group, hop.source, hop.out)
        return
    ranks, (_, group) = move.group, comm.subgroups(move.after.mesh, move.axes, move.group)
    dtype = hop.source.of.dtype if hop.source.of is not None else None
    assert dtype is not None
    once = comm.constant(ranks, hop.out, "once", RankConstant.first(group, dtype.numpy()))
    comm.emit(ranks, "Mul", [hop.source, once], hop.out)


def pad(comm: CommLowering, move: mv.ZeroPad, hop: Hop) -> None:
    """A sharded value as a partial sum: each rank's shard padded with zeros to the whole; pads are constants where the size is fixed.

    They are those of all axes where the rank is known: of a Pad that names axes onnxruntime reads them wrongly behind a Transpose.
    """
    shape, source, out, dim = comm.values.local_shape(hop.before), hop.source, hop.out, move.dim
    size = shape[dim] if shape is not None else None
    shards = math.prod(move.after.mesh[axis] for axis in move.axes)
    ranks, (_, group) = move.group, comm.subgroups(move.after.mesh, move.axes, move.group)
    last = shards - 1

    rank = len(shape) if shape is not None else 0

    def of_all_axes(before: str, after: str) -> RankConstant:
        numbers = {dim: before, dim + rank: after} if rank else {0: before, 1: after}
        return RankConstant.of(group, [numbers.get(k, "0") for k in range(2 * max(rank, 1))])

    if isinstance(size, int):
        pads = comm.constant(ranks, out, "pads", of_all_axes(f"{size}*place", f"{size * last} - {size}*place"))
    else:
        extent = comm.derived_op(ranks, "Shape", [source], out, "shape")
        extent = comm.derived_op(ranks, "Gather", [extent, comm.constant(ranks, out, "axis", [dim])], out, "extent")
        numbers = of_all_axes("place", f"{last} - place")
        pads = comm.derived_op(ranks, "Mul", [extent, comm.constant(ranks, out, "around", numbers)], out, "pads")
    axes = () if rank else (None, comm.constant(ranks, out, "axis", [dim]))
    comm.emit(ranks, "Pad", [source, pads, *axes], out)


def reshard(
    comm: CommLowering,
    source: ShardedValue,
    source_shards: Value,
    target: ShardedValue,
    destination: Value,
    cause: str,
    derived: bool = False,
) -> Value:
    """Brings `source`, which its ranks have as `source_shards`, to the layout and ranks of `target`; the value there.

    That is `destination`, or `source_shards` where nothing has to be done.
    """
    shape = comm.values[source.value].shape
    if shape is None:
        moves = lower_unknown(source.layout, target.layout, source.group, target.group)
    else:
        proven = divisors(comm.program, shape)
        moves = lower(source.layout, target.layout, source.group, target.group, proven)
    training = comm.program.training
    if training and source.value in training.parameters and moves and isinstance(moves[0], mv.Exchange | mv.Transfer):
        # A message may be on its way until the step ends, and the update overwrites the parameter before.
        source_shards = comm.derived_op(source.group, "Identity", [source_shards], source_shards, "sent")
        comm.declare(source, source_shards)
    at = source
    for k, move in enumerate(moves):
        last = k == len(moves) - 1 and move.group == target.group
        after = target if last else ShardedValue(source.value, move.group, move.after)
        ranks = tuple(dict.fromkeys((*source.group, *move.group)))
        out = destination if last else comm.job.derived_on(ranks, destination, f".{type(move).__name__.lower()}")
        _write(comm, move, Hop(at, after, source_shards, out, cause, derived))
        source_shards, at = out, after
    if moves and source_shards is not destination:  # more ranks have it than the target's
        comm.rename(target, source_shards, destination)
        source_shards = destination
    return source_shards


def _write(comm: CommLowering, move: mv.Move, hop: Hop) -> None:
    match move:
        case mv.Slice():
            slice_out(comm, move, hop)
        case mv.Exchange() | mv.Transfer():
            exchange(comm, move, hop)
        case mv.Reduce():
            reduce_to(comm, move, hop)
        case mv.ZeroPad():
            pad(comm, move, hop)
        case mv.MaskReplicas():
            keep(comm, move, hop)
        case _:
            _collective(comm, move, hop)
    comm.declare(hop.after, hop.out)


def _collective(
    comm: CommLowering, move: mv.AllReduce | mv.AllGather | mv.ReduceScatter | mv.AllToAll, hop: Hop
) -> None:
    attributes: Attributes
    match move:
        case mv.AllReduce(reduce=reduce):
            op_type, attributes = fmt.ALL_REDUCE, {fmt.REDUCE: reduce}
        case mv.AllGather(dim=dim):
            op_type, attributes = fmt.ALL_GATHER, {fmt.AXIS: dim}
        case mv.ReduceScatter(dim=dim, reduce=reduce):
            op_type, attributes = fmt.REDUCE_SCATTER, {fmt.AXIS: dim, fmt.REDUCE: reduce}
        case mv.AllToAll(split_dim=split, concat_dim=concat):
            op_type, attributes = fmt.ALL_TO_ALL, {fmt.SPLIT_AXIS: split, fmt.CONCAT_AXIS: concat}
    sets, group = comm.subgroups(move.after.mesh, move.axes, move.group)
    amount, value = comm.amount(hop.after.value, mv.received(move)[0]), hop.after.value
    tag = comm.event(op_type, hop, sets, group, amount)
    attributes = {fmt.GROUP: group, **attributes}
    step = Comm(op_type, (hop.source,), (hop.out,), attributes, tag, value, hop.cause, amount)
    comm.append(move.group, step)


_ONE_BY_ONE = 4
"""So many messages between the ranks of two groups are told one by one, each with the ranks that it goes from and to."""
Sent: TypeAlias = "tuple[int, Span]"
"""The rank at the other end, and the box in the own shard."""


def exchange(comm: CommLowering, move: mv.Exchange | mv.Transfer, hop: Hop) -> None:
    """Messages where all that is moved are shards as ranks have them, else one Exchange."""
    parts = move.routes.parts()
    if isinstance(move, mv.Transfer) and move.routes.before == move.routes.after:  # there are no boxes to work out
        _messages(comm, parts, hop)
        return
    sent_boxes, got = _boxes(move.routes, len(hop.before.layout.cuts))
    full = tuple((Fraction(0), Fraction(1)) for _ in hop.before.layout.cuts)
    if isinstance(move, mv.Transfer) and all(box == full for box in (*sent_boxes, *got)):
        _messages(comm, parts, hop)
        return
    ranks = tuple(sorted({p.source for p in parts} | {p.target for p in parts}))
    group = comm.group((ranks,))
    amount = comm.amount(hop.after.value, max(mv.received(move), default=Fraction(0)))
    tag = comm.event(fmt.EXCHANGE, hop, (ranks,), group, amount)
    leaving = _grouped((p.source, (p.target, box)) for p, box in zip(parts, sent_boxes, strict=True))
    coming = _grouped((p.target, (p.source, box)) for p, box in zip(parts, got, strict=True))
    alike: dict[tuple[tuple[Sent, ...], tuple[Sent, ...]], list[int]] = {}
    for rank in ranks:
        alike.setdefault((tuple(leaving.get(rank, ())), tuple(coming.get(rank, ()))), []).append(rank)
    for (sends, receives), alike_ranks in alike.items():
        attributes: dict[str, int | str | tuple[int, ...]] = {
            fmt.GROUP: group,
            fmt.SEND_PEERS: tuple(peer for peer, _ in sends),
            fmt.SEND_BOXES: _numbers([box for _, box in sends]),
            fmt.RECV_PEERS: tuple(peer for peer, _ in receives),
            fmt.RECV_BOXES: _numbers([box for _, box in receives]),
            fmt.RANK: len(full),
        }
        inputs, outputs = ((hop.source,) if sends else ()), ((hop.out,) if receives else ())
        step = Comm(fmt.EXCHANGE, inputs, outputs, attributes, tag, hop.after.value, hop.cause, amount)
        comm.append(tuple(alike_ranks), step)


def _messages(comm: CommLowering, parts: Sequence[ExchangeBox], hop: Hop) -> None:
    """A rank's shard to others as it is: a Broadcast of one rank to several, else messages, which are one op where they are many."""
    apart = [part for part in parts if part.source != part.target]
    if len(apart) > 1 and len({part.source for part in apart}) == 1 and has_size(comm.values[hop.after.value]):
        comm.identity_on(tuple(part.source for part in parts if part.source == part.target), hop.source, hop.out)
        broadcast(comm, (apart[0].source, *(part.target for part in apart)), hop)
        return
    pairs = tuple([(part.source, part.target) for part in apart])
    if _are_alike(comm, pairs, hop):
        comm.identity_on(tuple(part.source for part in parts if part.source == part.target), hop.source, hop.out)
        _messages_alike(comm, pairs, hop)
        return
    for part in parts:
        if part.source == part.target:
            comm.identity_on((part.source,), hop.source, hop.out)
        else:
            _message(comm, part.source, part.target, hop)


def _are_alike(comm: CommLowering, pairs: Sequence[tuple[int, int]], hop: Hop) -> bool:
    """Whether messages are so many that they are one op, and each rank has one end of one of them, under one name."""
    ends = ranks_of(tuple(rank for pair in pairs for rank in pair))
    if len(pairs) <= _ONE_BY_ONE or ends.bit_count() < 2 * len(pairs):
        return False
    targets = tuple(target for _, target in pairs)
    there = hop.source is not hop.out and comm.job.listed.ranks(hop.source) & ranks_of(targets)
    return not there and not any(_will_have(comm, target, hop.source, hop.after) for target in targets)


def _messages_alike(comm: CommLowering, pairs: tuple[tuple[int, int], ...], hop: Hop) -> None:
    """Messages between pairs of ranks as one op: ranks that do the same share a program, whomever they speak to."""
    sources, targets = tuple(source for source, _ in pairs), tuple(target for _, target in pairs)
    shape, value, way = comm.values.local_shape(hop.after), hop.after.value, hop.source
    amount, group = comm.amount(value, share_of_shard(hop.after.layout)), comm.group(pairs)
    comm.job.extend((*sources, *targets), way)
    if way is not hop.out:
        comm.job.declare(targets, way, value, shape)
    tag, cause = len(comm.events), hop.cause
    comm.events.append(Event(tag, fmt.SEND, value, way, pairs, group, shape, amount, cause, hop.derived))
    comm.append((*sources, *targets), Transfer(way, sources, targets, tag, value, cause, amount, group))
    comm.identity_on(targets, way, hop.out)


def _message(comm: CommLowering, source: int, target: int, hop: Hop) -> None:
    """One message. Both ends have one value; where the target has it already, or one of its name, a copy is sent."""
    shape, value, way = comm.values.local_shape(hop.after), hop.after.value, hop.source
    amount = comm.amount(value, share_of_shard(hop.after.layout))
    if way is not hop.out and (comm.job.listed.ranks(way) >> target & 1 or _will_have(comm, target, way, hop.after)):
        way = comm.job.derived_on((source, target), hop.source, f".to.{target}")
        comm.identity_on((source,), hop.source, way)
        comm.job.declare((source,), way, hop.before.value, shape)
    comm.job.extend((source, target), way)
    if way is not hop.out:
        comm.job.declare((target,), way, value, shape)
    tag, cause = len(comm.events), hop.cause
    comm.events.append(Event(tag, fmt.SEND, value, way, ((source,), (target,)), "", shape, amount, cause, hop.derived))
    comm.append((source, target), Transfer(way, (source,), (target,), tag, value, cause, amount))
    comm.identity_on((target,), way, hop.out)


def _will_have(comm: CommLowering, rank: int, given: Value, version: ShardedValue) -> bool:
    """Whether another version of the value has the name of `given` on a rank."""
    others = (one for one in comm.values.versions(version.value) if one != version)
    return any(str(comm.values.at[one]) == str(given) and rank in one.group for one in others)


def _boxes(routes: Routes, dims: int) -> tuple[list[Span], list[Span]]:
    """For each part that is moved, its box within the source rank's shard, and within the target rank's shard."""
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


def reduce_to(comm: CommLowering, move: mv.Reduce, hop: Hop) -> None:
    """A Reduce: all ranks give their terms, the roots have the sum."""
    sets, group = comm.subgroups(move.before.mesh, move.axes, move.source_group)
    value, amount = hop.after.value, comm.amount(hop.after.value, share_of_shard(hop.after.layout))
    tag = comm.event(fmt.REDUCE_TO, hop, sets, group, amount)
    said: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group, fmt.ROOT: move.root, fmt.REDUCE: move.reduce}
    others = tuple(rank for rank in move.source_group if rank not in move.group)
    for ranks, made in ((others, ()), (move.group, (hop.out,))):
        comm.append(ranks, Comm(fmt.REDUCE_TO, (hop.source,), made, said, tag, value, hop.cause, amount))


def broadcast(comm: CommLowering, ranks: Group, hop: Hop) -> None:
    """A Broadcast of the value that the first of the ranks has whole; it keeps its own, and the others get it."""
    group, value = comm.group((ranks,)), hop.after.value
    amount = comm.amount(value, share_of_shard(hop.before.layout))
    tag = comm.event(fmt.BROADCAST, hop, (ranks,), group, amount)
    said: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: group, fmt.ROOT: 0}
    for some, given, made in ((ranks[:1], (hop.source,), ()), (ranks[1:], (), (hop.out,))):
        comm.append(some, Comm(fmt.BROADCAST, given, made, said, tag, value, hop.cause, amount))


def has_size(info: ValueInfo) -> bool:
    """Whether a value is a tensor of numbers whose shape the symbols tell."""
    return info.is_tensor and info.shape is not None and info.item_bytes is not None


def share_of_shard(layout: Layout) -> Fraction:
    """The share of a value that one rank has."""
    return Fraction(1, math.prod(layout.shards))
