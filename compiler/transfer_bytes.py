"""How many bytes a value has, as an expression in the symbols: `3456*batch`, `40`, `unknown`."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.program import ValueInfo


def bytes_text(info: ValueInfo) -> str:
    """The bytes of a value; `unknown` where its shape is known only when it runs, or its items are no whole bytes."""
    if info.shape is None or info.item_bytes is None or not info.is_tensor:
        return "unknown"
    fixed = info.item_bytes
    total: ir.SymbolicDim | None = None
    for dim in info.shape:
        if isinstance(dim, int):
            fixed *= dim
        else:
            total = ir.SymbolicDim(dim) if total is None else total * ir.SymbolicDim(dim)
    return str(fixed) if total is None else str((total * fixed).value)
