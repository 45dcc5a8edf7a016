"""A reshard in ranks' programs: its moves (`layout/reshard.py`) as messages, collectives and local nodes.

h on 0-3 [2, 1]  -->  h on 0-3 [1, 1]      every rank   %h = AllGather(%h@[2, 1])
h on 0           -->  h on 1               rank 0       Send(%h, 1)          rank 1   %h = Recv(0)
"""

from __future__ import annotations

from partc.compiler.ir.programs import Comm, Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.layout import moves as mv
from partc.compiler.layout.reshard import lower, lower_unknown
from partc.compiler.lower.comm import Attributes, CommLowering, Hop
from partc.compiler.lower.exchanges import exchange, reduce_to
from partc.compiler.lower.local_moves import keep, pad, slice_out
from partc.compiler.sharding.values.operands import divisors
from partc.runtime.artifact import format as fmt


def reshard(
    comm: CommLowering,
    source: ShardedValue,
    given: Value,
    target: ShardedValue,
    wanted: Value,
    cause: str,
    derived: bool = False,
) -> Value:
    """Brings `source`, which its ranks have as `given`, to the layout and ranks of `target`; the value there.

    That is `wanted`, or `given` where nothing has to be done.
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
        given = comm.beside(source.group, "Identity", [given], given, "sent")
        comm.declare(source, given)
    at = source
    for k, move in enumerate(moves):
        last = k == len(moves) - 1 and move.group == target.group
        after = target if last else ShardedValue(source.value, move.group, move.after)
        ranks = tuple(dict.fromkeys((*source.group, *move.group)))
        out = wanted if last else comm.job.beside(ranks, wanted, f".{type(move).__name__.lower()}")
        _write(comm, move, Hop(at, after, given, out, cause, derived))
        given, at = out, after
    if moves and given is not wanted:  # more ranks have it than the target's
        comm.rename(target, given, wanted)
        given = wanted
    return given


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
    step = Comm(op_type, (hop.given,), (hop.out,), attributes, tag, value, hop.cause, amount)
    comm.append(move.group, step)
