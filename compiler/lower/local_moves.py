"""Changes of layout that need nothing of another rank: a slice, a zero where others have the term, a shard among zeros.

All ranks do the same; which shard is a rank's own is a constant by its place, so that they share one program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.compiler.ir.program import Group, RankConstant, ShardedValue
from partc.compiler.layout import moves as mv
from partc.compiler.tasks.localize import local_shape

if TYPE_CHECKING:
    from partc.compiler.lower.comm import CommLowering


def slice_out(
    writer: CommLowering,
    move: mv.Slice,
    before: ShardedValue,
    after: ShardedValue,
    name: str,
    out: str,
    dim: int,
    axes: Sequence[int],
) -> None:
    """The shard of each rank's place: fixed bounds where the size is fixed, else computed from the extent."""
    shape = local_shape(writer.program, before)
    size = shape[dim] if shape is not None else None
    shards = math.prod(move.after.mesh[axis] for axis in axes)
    ranks, (_, group) = move.group, writer.circles(move.after.mesh, tuple(axes), move.group)
    axis = writer.constant(ranks, out, "axis", [dim])
    if isinstance(size, int):
        length = size // shards
        begin = writer.constant(ranks, out, "begin", RankConstant.of(group, [f"{length}*place"]))
        end = writer.constant(ranks, out, "end", RankConstant.of(group, [f"{length}*place + {length}"]))
    else:
        extent = writer.beside(ranks, "Shape", [name], f"{out}.shape")
        extent = writer.beside(ranks, "Gather", [extent, axis], f"{out}.extent")
        count = writer.constant(ranks, out, "shards", [shards])
        step = writer.beside(ranks, "Div", [extent, count], f"{out}.length")
        shard = writer.constant(ranks, out, "shard", RankConstant.of(group, ["place"]))
        begin = writer.beside(ranks, "Mul", [step, shard], f"{out}.begin")
        end = writer.beside(ranks, "Add", [begin, step], f"{out}.end")
    writer.emit(ranks, "Slice", [name, begin, end, axis], out, after.value.producer())


def keep(writer: CommLowering, move: mv.MaskReplicas, name: str, out: str, axes: Sequence[int]) -> None:
    """Terms of a sum of what all ranks have: it on the first along the axes, zeros on the others."""
    if move.reduce != "sum":
        writer.identity_on(move.group, name, out)
        return
    ranks, (_, group) = move.group, writer.circles(move.after.mesh, tuple(axes), move.group)
    once = writer.constant(ranks, out, "once", RankConstant.first(group, _numbers_of(writer, ranks, name)))
    writer.emit(ranks, "Mul", [name, once], out, None)


def pad(
    writer: CommLowering, move: mv.ZeroPad, before: ShardedValue, name: str, out: str, dim: int, axes: Sequence[int]
) -> None:
    """Terms of a sum of what is cut: the own shard at its place among zeros; fixed ones where the size is fixed."""
    shape = local_shape(writer.program, before)
    size = shape[dim] if shape is not None else None
    shards = math.prod(move.after.mesh[axis] for axis in axes)
    ranks, (_, group) = move.group, writer.circles(move.after.mesh, tuple(axes), move.group)
    axis, last = writer.constant(ranks, out, "axis", [dim]), shards - 1
    if isinstance(size, int):
        around = [f"{size}*place", f"{size * last} - {size}*place"]
        pads = writer.constant(ranks, out, "pads", RankConstant.of(group, around))
    else:
        extent = writer.beside(ranks, "Shape", [name], f"{out}.shape")
        extent = writer.beside(ranks, "Gather", [extent, axis], f"{out}.extent")
        numbers = RankConstant.of(group, ["place", f"{last} - place"])
        pads = writer.beside(ranks, "Mul", [extent, writer.constant(ranks, out, "around", numbers)], f"{out}.pads")
    writer.emit(ranks, "Pad", [name, pads, "", axis], out, None)


def _numbers_of(writer: CommLowering, ranks: Group, name: str) -> np.dtype[Any]:
    (draft, *_) = writer.drafts.of(ranks)
    dtype = draft.types[name][0].dtype
    assert dtype is not None
    return dtype.numpy()
