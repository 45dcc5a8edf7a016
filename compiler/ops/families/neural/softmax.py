"""Softmax and its like: the axis over which they normalize is replicated, everything else is free."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import LETTERS, axis_of, opset_of, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

_OLD = "before opset 13 all dims from the axis on"

softmax = op("Softmax", factors="ax->ax", replicated="x", remarks=_OLD, kernel="normalization")
log_softmax = op("LogSoftmax", factors="ax->ax", replicated="x", remarks=_OLD, kernel="normalization")
hardmax = op("Hardmax", factors="ax->ax", replicated="x", remarks=_OLD, precision="follow", rounds="sums")

op(
    "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss",
    why="written out as reductions, which are cut, where operators are sharded and in training",
)


@softmax.sharding
@log_softmax.sharding
@hardmax.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    if opset_of(node) < 13:
        axis = axis_of(node, rank, 1)
        return replicated_along(node, range(axis, rank))
    return replicated_along(node, [axis_of(node, rank, -1)])


@softmax.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = Y (dY - sum(dY Y))."""
    y = g.output(0)
    part = g.Mul(dy, y)
    return g.Sub(part, g.Mul(y, g.sum(part, _along(g, x), keepdims=True)))


@log_softmax.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY - exp(Y) sum(dY)."""
    return g.Sub(dy, g.Mul(g.Exp(g.output(0)), g.sum(dy, _along(g, x), keepdims=True)))


def replicated_along(node: ir.Node, axes: range | list[int]) -> Rule | None:
    """The rule of a unary op that needs some axes replicated."""
    letters = "".join(WHOLE if dim in axes else LETTERS[dim] for dim in range(rank_of(node.inputs[0]) or 0))
    return rule(node, f"{letters}->{letters}")


def _along(g: GradientBuilder, x: str) -> list[int]:
    rank = g.rank(x)
    if opset_of(g.node) < 13:
        return list(range(g.attribute("axis", 1) % rank, rank))
    return [g.attribute("axis", -1) % rank]
