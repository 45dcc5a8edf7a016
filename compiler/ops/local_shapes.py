"""Makes extents local that a node reads as data: the target of a Reshape, the shape of an Expand, the sizes of a Resize.

Where the local extents are known, they become a constant; where they are dynamic, the global ones are divided at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.rule import WHOLE, Local


def shards_of(local: Local, letters: str | None) -> tuple[int, ...]:
    """The number of shards of each dim of an operand."""
    return tuple(1 if letter == WHOLE else local.num_shards(letter) for letter in letters or "")


def local_dims(local: Local, name: str) -> tuple[int | None, ...] | None:
    """The local dims of an operand or output, None for one that is dynamic; None where the shape is unknown."""
    shape = local.local_shapes.get(name)
    return None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape)


def integers(local: Local, name: str, numbers: Sequence[int]) -> str:
    """A constant vector of int64."""
    return local.constant(name, np.array(numbers, np.int64))


def integer(local: Local, name: str, number: int) -> str:
    """A constant scalar of int64."""
    return local.constant(name, np.array(number, np.int64))


def divided(local: Local, extents: str, shards: Sequence[int], *, round_up: bool = False) -> str:
    """The extents of `extents`, a vector of int64, divided by the shards; with `round_up` an extent of 1 stays 1."""
    by = integers(local, "shards", shards)
    if round_up:
        extents = local.emit("Add", [extents, integers(local, "less", [count - 1 for count in shards])], "raised")
    return local.emit("Div", [extents, by], "extents")


def as_int64(local: Local, k: int) -> str:
    """Operand `k` as integers of 64 bits."""
    value = local.node.inputs[k]
    if value is not None and value.dtype == ir.DataType.INT64:
        return local.inputs[k]
    return local.emit("Cast", [local.inputs[k]], f"operand{k}", to=ir.DataType.INT64.value)


def as_typed(local: Local, k: int, name: str) -> str:
    """Integers of 64 bits as operand `k`, cast to its type: kernels do not exist for every mixture."""
    value = local.node.inputs[k]
    if value is None or value.dtype is None or value.dtype == ir.DataType.INT64:
        return name
    return local.emit("Cast", [name], f"local{k}", to=value.dtype.value)


def shard_of(local: Local, whole: str, dim: int, letter: str, output: str) -> str:
    """This rank's shard, along one dim, of a value that every rank has made entirely."""
    shape = local.emit("Shape", [whole], "whole_shape")
    size = local.emit("Gather", [shape, integers(local, "dim", [dim])], "size")
    length = local.emit("Div", [size, integers(local, "shards", [local.num_shards(letter)])], "length")
    begin = local.emit("Mul", [length, integers(local, "shard", [local.index(letter)])], "begin")
    end = local.emit("Add", [begin, length], "end")
    return local.give("Slice", [whole, begin, end, integers(local, "axes", [dim])], output)
