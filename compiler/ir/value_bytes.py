"""How many bytes a value has, as an expression in the symbols: `3456*batch`, `40`, `unknown`."""

from __future__ import annotations

import math

import onnx_ir as ir
import sympy
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read
from partc.compiler.ir.value_info import Shape, ValueInfo


def bytes_of(info: ValueInfo, shape: Shape | None) -> int | ir.SymbolicDim | None:
    """The bytes of a value, or of a shard of it, of this shape; None where only a run tells, or its items are no whole bytes."""
    if shape is None or info.item_bytes is None or not info.is_tensor:
        return None
    fixed = math.prod(dim for dim in shape if isinstance(dim, int)) * info.item_bytes
    open_dims = [read(dim) for dim in shape if isinstance(dim, str)]
    if any(dim is None for dim in open_dims):
        return None
    return as_dim(normal(sympy.Mul(fixed, *open_dims), {}))


def whole_bytes(info: ValueInfo) -> int | ir.SymbolicDim | None:
    """The bytes of a whole value."""
    return bytes_of(info, info.shape)


def bytes_text(info: ValueInfo, shape: Shape | None) -> str:
    """The bytes of a value, or of a shard of it, as text."""
    found = bytes_of(info, shape)
    return "unknown" if found is None else str(found) if isinstance(found, int) else str(found.value)
