"""Indices into a sharded axis: each rank reads or writes the rows that it holds, and masks out the others.

With V rows in n shards, a rank whose rows begin at `offset` sees index i at `i - offset`, after a negative i has got V added, and has it if
that is in 0 .. V/n - 1. The program is the same on every rank but for constants. An index of V or more is taken for one of the last shard,
where the lookup itself refuses it, as that of the unsharded model does: masked, it would be zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.local_shapes import integer
from partc.compiler.ops.rule import Local

OLDEST_OPSET = 9
"""The first opset whose Where and Less of int64 a lookup needs."""


_NO_BOUND = 1 << 40
"""More rows than any table has."""


@dataclass(frozen=True)
class RowRange:
    """Names of scalars: how many rows there are globally and in this rank's shard, and the first of the shard."""

    total: str
    here: str
    offset: str
    end: str
    """Exclusive upper bound of a local index; absent on the last shard."""


@dataclass(frozen=True)
class LocalIndices:
    """Names: indices counted from the shard's begin, which of them the rank has, and those indices with 0 for the others."""

    relative: str
    present: str
    safe: str


def rows_of(local: Local, k: int, axis: int, letter: str) -> RowRange:
    """The rows of operand `k` along a sharded axis: constants where the extent is known, else nodes that read it."""
    name, shards, index = local.inputs[k], local.num_shards(letter), local.index(letter)
    shape = local.global_shapes.get(name)
    total = None if shape is None else shape[axis]
    if isinstance(total, int):
        here = total // shards
        end = _NO_BOUND if index == shards - 1 else here
        return RowRange(
            integer(local, f"{letter}.rows", total),
            integer(local, f"{letter}.here", here),
            integer(local, f"{letter}.offset", index * here),
            integer(local, f"{letter}.end", end),
        )
    extents = local.emit("Shape", [name], f"{letter}.shape")
    length = local.emit("Gather", [extents, integer(local, f"{letter}.axis", axis)], f"{letter}.here")
    return RowRange(
        local.emit("Mul", [length, integer(local, f"{letter}.shards", shards)], f"{letter}.rows"),
        length,
        local.emit("Mul", [length, integer(local, f"{letter}.shard", index)], f"{letter}.offset"),
        length,
    )


def look_up(local: Local, indices: str, rows: RowRange, letter: str) -> LocalIndices:
    """Computes the positions of `indices`, of int64, in this rank's shard."""
    zero = integer(local, f"{letter}.zero", 0)

    def emit(op_type: str, inputs: list[str], word: str) -> str:
        return local.emit(op_type, inputs, f"{letter}.{word}")

    from_end = emit("Less", [indices, zero], "from_end")
    counted = emit("Where", [from_end, emit("Add", [indices, rows.total], "added"), indices], "counted")
    relative = emit("Sub", [counted, rows.offset], "relative")
    before = emit("Less", [relative, zero], "before")
    below = emit("Less", [relative, rows.end], "below")
    present = emit("And", [emit("Not", [before], "begun"), below], "present")
    return LocalIndices(relative, present, emit("Where", [present, relative, zero], "safe"))


def masked(local: Local, values: str, present: str, dtype: ir.DataType, output: str) -> str:
    """The values where `present`, 0 elsewhere: this rank's term of the sum."""
    nothing = local.constant("nothing", np.zeros((), dtype.numpy()))
    return local.give("Where", [present, values, nothing], output)


def spread(local: Local, present: str, rank: int, trailing: int) -> str:
    """A mask of `rank` dims with `trailing` dims of 1 behind them."""
    if not trailing:
        return present
    shape = local.constant("mask.shape", np.array([0] * rank + [1] * trailing, np.int64))
    return local.emit("Reshape", [present, shape], "mask")


def summable(dtype: ir.DataType | None) -> bool:
    """Whether terms of this type can be added up; not known for a value of no type."""
    return dtype is not None and (dtype.is_floating_point() or dtype.is_integer()) and dtype.bitwidth >= 8
