"""Layers without weights, element by element or over one axis: activations, `Softmax`, `Dropout`, `Identity`, and `stop_gradient`."""

from __future__ import annotations

from typing import ClassVar, Literal

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.ir.graph import STOPS_GRADIENT
from partc.compiler.nn.module import Module


class _Plain(Module):
    op_type: ClassVar[str]

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = getattr(op, self.op_type)(x)
        return y


class ReLU(_Plain):
    """`max(x, 0)`."""

    op_type = "Relu"


class Sigmoid(_Plain):
    """`1 / (1 + exp(-x))`."""

    op_type = "Sigmoid"


class Tanh(_Plain):
    """`tanh x`."""

    op_type = "Tanh"


class Identity(_Plain):
    """`x`; it keeps a node of its own, so that it can be placed."""

    op_type = "Identity"


def stop_gradient(op: OpBuilder, x: ir.Value) -> ir.Value:
    """`x`, through which no gradient flows in a training, as torch's `x.detach()`."""
    y: ir.Value = op.Identity(x)
    node = y.producer()
    assert node is not None
    node.metadata_props[STOPS_GRADIENT] = "true"
    return y


class LeakyReLU(Module):
    """`x` above 0, `negative_slope * x` below."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.LeakyRelu(x, alpha=self.negative_slope)
        return y


class GELU(Module):
    """`x` times the probability that a standard normal variable lies below it; exact, or `approximate="tanh"`."""

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.Gelu(x, approximate=self.approximate)
        return y


class SiLU(Module):
    """`x * sigmoid(x)`, in two ops: onnxruntime has no kernel for ONNX's Swish."""

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.Mul(x, op.Sigmoid(x))
        return y


class _Softmax(Module):
    op_type: ClassVar[str]

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = getattr(op, self.op_type)(x, axis=self.dim)
        return y


class Softmax(_Softmax):
    """`exp x` over its sum along `dim`, by default the last axis."""

    op_type = "Softmax"


class LogSoftmax(_Softmax):
    """The logarithm of `Softmax`, without its loss of small values."""

    op_type = "LogSoftmax"


class Dropout(Module):
    """In training, zero with probability `p` and `x / (1 - p)` otherwise; in inference `x` itself, without a node."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"p is a probability below 1, got {p}")
        self.p = p

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        if not self.training:
            return x
        y: ir.Value = op.Dropout(x, self.p, True)
        return y
