"""The text of a value's type in the dumps, with its global or its local shape."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.value_info import Shape


def value_text(program: Program, value: ir.Value, shape: Shape | None) -> str:
    """A value's type in a given shape; where that is not known, with the dims that are numbers."""
    info = program.values[value]
    if not info.is_tensor:
        return f"<{info.type}>"
    if shape is not None:
        return f"<{info.type}, ({', '.join(map(str, shape))})>"
    if value.shape is None:
        return f"<{info.type}, ?>"
    dims = ", ".join(str(d) if isinstance(d, int) else "?" for d in value.shape.dims)
    return f"<{info.type}, ({dims})>"
