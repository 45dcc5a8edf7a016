"""A reshard in ranks' programs: its moves (`layout/reshard.py`) as messages, collectives and local nodes.

h on 0-3 [2, 1]  -->  h on 0-3 [1, 1]      every rank   %h = AllGather(%h@[2, 1])
h on 0           -->  h on 1               rank 0       Send(%h, 1)          rank 1   %h = Recv(0)

Moves without communication: a slice of a replicated value, a replicated or sharded value as a partial sum with zeros.

All ranks do the same; which shard is a rank's own is a constant by its place, so that they share one program.
"""

from __future__ import annotations

import math

from partc.compiler.ir.constants import RankConstant
from partc.compiler.ir.programs import Comm, Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.layout import moves as mv
from partc.compiler.layout.reshard import lower, lower_unknown
from partc.compiler.lower.comm import Attributes, CommLowering, Hop
from partc.compiler.lower.exchanges import exchange, reduce_to
from partc.compiler.sharding.values.operands import divisors
from partc.runtime.artifact import format as fmt


def slice_out(comm: CommLowering, move: mv.Slice, hop: Hop) -> None:
    """Slices the shard of each rank's place; bounds are constants where the size is fixed, else computed from the extent."""
    shape, given, out, dim = comm.values.local_shape(hop.before), hop.source, hop.out, move.dim
    size = shape[dim] if shape is not None else None
    shards = math.prod(move.after.mesh[axis] for axis in move.axes)
    ranks, (_, group) = move.group, comm.subgroups(move.after.mesh, move.axes, move.group)
    axis = comm.constant(ranks, out, "axis", [dim])
    if isinstance(size, int):
        length = size // shards
        begin = comm.constant(ranks, out, "begin", RankConstant.of(group, [f"{length}*place"]))
        end = comm.constant(ranks, out, "end", RankConstant.of(group, [f"{length}*place + {length}"]))
    else:
        extent = comm.derived_op(ranks, "Shape", [given], out, "shape")
        extent = comm.derived_op(ranks, "Gather", [extent, axis], out, "extent")
        count = comm.constant(ranks, out, "shards", [shards])
        step = comm.derived_op(ranks, "Div", [extent, count], out, "length")
        shard = comm.constant(ranks, out, "shard", RankConstant.of(group, ["place"]))
        begin = comm.derived_op(ranks, "Mul", [step, shard], out, "begin")
        end = comm.derived_op(ranks, "Add", [begin, step], out, "end")
    comm.emit(ranks, "Slice", [given, begin, end, axis], out, hop.after.value.producer())


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
    shape, given, out, dim = comm.values.local_shape(hop.before), hop.source, hop.out, move.dim
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
        extent = comm.derived_op(ranks, "Shape", [given], out, "shape")
        extent = comm.derived_op(ranks, "Gather", [extent, comm.constant(ranks, out, "axis", [dim])], out, "extent")
        numbers = of_all_axes("place", f"{last} - place")
        pads = comm.derived_op(ranks, "Mul", [extent, comm.constant(ranks, out, "around", numbers)], out, "pads")
    axes = () if rank else (None, comm.constant(ranks, out, "axis", [dim]))
    comm.emit(ranks, "Pad", [given, pads, *axes], out)


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
