"""Moves without communication: a slice of a replicated value, a replicated or sharded value as a partial sum with zeros.

All ranks do the same; which shard is a rank's own is a constant by its place, so that they share one program.
"""

from __future__ import annotations

import math

from partc.compiler.ir.constants import RankConstant
from partc.compiler.layout import moves as mv
from partc.compiler.lower.comm import CommLowering, Hop


def slice_out(comm: CommLowering, move: mv.Slice, hop: Hop) -> None:
    """Slices the shard of each rank's place; bounds are constants where the size is fixed, else computed from the extent."""
    shape, given, out, dim = comm.values.local_shape(hop.before), hop.given, hop.out, move.dim
    size = shape[dim] if shape is not None else None
    shards = math.prod(move.after.mesh[axis] for axis in move.axes)
    ranks, (_, group) = move.group, comm.subgroups(move.after.mesh, move.axes, move.group)
    axis = comm.constant(ranks, out, "axis", [dim])
    if isinstance(size, int):
        length = size // shards
        begin = comm.constant(ranks, out, "begin", RankConstant.of(group, [f"{length}*place"]))
        end = comm.constant(ranks, out, "end", RankConstant.of(group, [f"{length}*place + {length}"]))
    else:
        extent = comm.beside(ranks, "Shape", [given], out, "shape")
        extent = comm.beside(ranks, "Gather", [extent, axis], out, "extent")
        count = comm.constant(ranks, out, "shards", [shards])
        step = comm.beside(ranks, "Div", [extent, count], out, "length")
        shard = comm.constant(ranks, out, "shard", RankConstant.of(group, ["place"]))
        begin = comm.beside(ranks, "Mul", [step, shard], out, "begin")
        end = comm.beside(ranks, "Add", [begin, step], out, "end")
    comm.emit(ranks, "Slice", [given, begin, end, axis], out, hop.after.value.producer())


def keep(comm: CommLowering, move: mv.MaskReplicas, hop: Hop) -> None:
    """A replicated value as a partial sum: the value on the first rank along the axes, zeros on the others."""
    if move.reduce != "sum":
        comm.identity_on(move.group, hop.given, hop.out)
        return
    ranks, (_, group) = move.group, comm.subgroups(move.after.mesh, move.axes, move.group)
    dtype = hop.given.of.dtype if hop.given.of is not None else None
    assert dtype is not None
    once = comm.constant(ranks, hop.out, "once", RankConstant.first(group, dtype.numpy()))
    comm.emit(ranks, "Mul", [hop.given, once], hop.out)


def pad(comm: CommLowering, move: mv.ZeroPad, hop: Hop) -> None:
    """A sharded value as a partial sum: each rank's shard padded with zeros to the whole; pads are constants where the size is fixed.

    They are those of all axes where the rank is known: of a Pad that names axes onnxruntime reads them wrongly behind a Transpose.
    """
    shape, given, out, dim = comm.values.local_shape(hop.before), hop.given, hop.out, move.dim
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
        extent = comm.beside(ranks, "Shape", [given], out, "shape")
        extent = comm.beside(ranks, "Gather", [extent, comm.constant(ranks, out, "axis", [dim])], out, "extent")
        numbers = of_all_axes("place", f"{last} - place")
        pads = comm.beside(ranks, "Mul", [extent, comm.constant(ranks, out, "around", numbers)], out, "pads")
    axes = () if rank else (None, comm.constant(ranks, out, "axis", [dim]))
    comm.emit(ranks, "Pad", [given, pads, *axes], out)
