"""A single ONNX op as a module."""

from __future__ import annotations

import onnx.defs
import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.nn.module import Module
from partc.compiler.plan.pattern import nearest

Attribute = int | float | str | list[int] | list[float] | list[str] | ir.TensorProtocol


class Op(Module):
    """An op that has a name in the model, so that it can be cut and placed where it is made.

        self.matmul1 = nn.Op("MatMul").shard(((2, 4), (4, 1)))        in forward: self.matmul1(op, x, weight)

    `attributes` are the op's own; it is called with the op builder and the op's inputs.
    """

    def __init__(self, op_type: str, /, **attributes: Attribute) -> None:
        super().__init__()
        if not onnx.defs.has(op_type):
            near = nearest(
                op_type, sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})
            )
            listed = ", ".join(f"'{name}'" for name in near)
            raise ValueError(f"ONNX has no op '{op_type}'" + (f"; the nearest are {listed}" if near else ""))
        self.op_type, self.attributes = op_type, attributes

    def forward(self, op: OpBuilder, *inputs: ir.Value | float | None) -> ir.Value | tuple[ir.Value, ...]:
        made: ir.Value | tuple[ir.Value, ...] = getattr(op, self.op_type)(*inputs, **self.attributes)
        return made
