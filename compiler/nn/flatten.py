"""`Flatten`: merges several axes into one."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.nn.module import Module


class Flatten(Module):
    """The axes `start_dim` to `end_dim`, both included, become one; by default all but the first."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        if start_dim < 0 and end_dim >= 0:
            raise ValueError(f"start_dim {start_dim} counts from the end and end_dim {end_dim} from the beginning")
        if (start_dim < 0) == (end_dim < 0) and start_dim > end_dim:
            raise ValueError(f"start_dim {start_dim} comes after end_dim {end_dim}")
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value
        if (self.start_dim, self.end_dim) == (1, -1):
            y = op.Flatten(x, axis=1)
            return y
        if self.end_dim == -1 and self.start_dim >= 0:
            y = op.Reshape(x, [0] * self.start_dim + [-1])
            return y
        parts = [op.Shape(x, start=0, end=self.start_dim)] if self.start_dim else []
        parts.append([-1])
        if self.end_dim != -1:
            parts.append(op.Shape(x, start=self.end_dim + 1))
        y = op.Reshape(x, op.Concat(*parts, axis=0))
        return y
