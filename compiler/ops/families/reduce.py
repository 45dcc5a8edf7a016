"""Reductions: a cut of a dim that is reduced leaves a term of the sum, the largest or the smallest of a shard.

What takes a root or a logarithm after its sum needs the whole of its axes; so do the positions of the largest, and running sums.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from partc.compiler.autodiff.engine import GradientBuilder, gradient, no_gradient
from partc.compiler.autodiff.shapes import like
from partc.compiler.ops.families.pool import scaled
from partc.compiler.ops.local import Local
from partc.compiler.ops.node import LETTERS, axes_of, axis_of, constant_ints, counted, operand, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

_INEXACT = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@op("ReduceSum")
def reduce_sum(node: ir.Node) -> Rule | None:
    """`ax->a`; x contracted; a sum passes."""
    return _reduction(node, "sum", linear="joint")


@op("ReduceMean")
def reduce_mean(node: ir.Node) -> Rule | None:
    """`ax->a`; x contracted; a sum passes; of integers x stays whole."""
    data = operand(node, 0)
    if data is None or data.dtype not in _INEXACT:
        return _reduction(node, "")
    return _reduction(node, "sum", linear="joint", local=scaled)


@op("ReduceL1", "ReduceSumSquare")
def reduce_bent_sum(node: ir.Node) -> Rule | None:
    """`ax->a`; x contracted."""
    return _reduction(node, "sum")


@op("ReduceMax")
def reduce_max(node: ir.Node) -> Rule | None:
    """`ax->a`; x contracted by max; of booleans x stays whole."""
    return _reduction(node, "" if _boolean(node) else "max")


@op("ReduceMin")
def reduce_min(node: ir.Node) -> Rule | None:
    """`ax->a`; x contracted by min; of booleans x stays whole."""
    return _reduction(node, "" if _boolean(node) else "min")


@op("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd")
def reduce_whole(node: ir.Node) -> Rule | None:
    """`ax->a`; x whole."""
    return _reduction(node, "")


@op("ArgMax", "ArgMin")
def position(node: ir.Node) -> Rule | None:
    """`ax->a`; x whole."""
    rank = rank_of(node.inputs[0]) or 0
    return _over(node, (axis_of(node, rank, 0),), "", bool(node.attributes.get_int("keepdims", 1)))


no_gradient("ArgMax", "ArgMin")


@op("TopK")
def top_k(node: ir.Node) -> Rule | None:
    """`ax,_->a.,a.`; x whole."""
    rank = rank_of(node.inputs[0]) or 0
    letters = _along(rank, axis_of(node, rank, -1))
    return rule(node, f"{letters},_->{letters},{letters}")


@gradient("TopK")
def top_k_gradient(g: GradientBuilder, dy: str | None, _: str | None, x: str, k: str) -> str | None:
    """dX = dY put back where the largest were, zeros elsewhere."""
    axis = axis_of(g.node, g.rank(x), -1)
    return dy and like(g, str(g.ScatterElements(g.zeros(x), g.output(1), dy, axis=axis)), x)


@op("CumSum")
def cumulated_sum(node: ir.Node) -> Rule | None:
    """`ax,_->ax`; x whole; a sum passes."""
    return _cumulated(node, "joint")


@gradient("CumSum")
def cumulated_sum_gradient(g: GradientBuilder, dy: str, x: str, axis: str) -> str:
    """dX = the sums of dY from the other end."""
    exclusive, reverse = g.attribute("exclusive", 0), g.attribute("reverse", 0)
    return str(g.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse))


@op("CumProd")
def cumulated_product(node: ir.Node) -> Rule | None:
    """`ax,_->ax`; x whole."""
    return _cumulated(node, "")


def _cumulated(node: ir.Node, linear: str) -> Rule | None:
    axis, rank = constant_ints(node, 1), rank_of(node.inputs[0]) or 0
    if not axis:
        return rule(node, "_,_->_", linear=linear, terms=(0,))
    letters = _along(rank, counted(axis[0], rank))
    return rule(node, f"{letters},_->{letters}", linear=linear, terms=(0,))


def _along(rank: int, axis: int) -> str:
    return LETTERS[:axis] + WHOLE + LETTERS[axis + 1 : rank]


def _boolean(node: ir.Node) -> bool:
    data = operand(node, 0)
    return data is None or data.dtype in (None, ir.DataType.BOOL)


def _reduction(
    node: ir.Node, reduction: str, linear: str = "", local: Callable[[Local], None] | None = None
) -> Rule | None:
    """The rule of a node with `axes`; `reduction` is that of a cut of an axis, empty where the axes stay whole."""
    rank = rank_of(node.inputs[0]) or 0
    axes = axes_of(node, rank)
    if axes is None:
        return rule(node, "_,_->_", linear=linear, terms=(0,))
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return rule(node, "*,_->*", linear=linear, terms=(0,))
        axes = tuple(range(rank))
    return _over(node, axes, reduction, bool(node.attributes.get_int("keepdims", 1)), linear, local)


def _over(
    node: ir.Node,
    axes: tuple[int, ...],
    reduction: str,
    keepdims: bool,
    linear: str = "",
    local: Callable[[Local], None] | None = None,
) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    letters = [WHOLE if dim in axes and not reduction else LETTERS[dim] for dim in range(rank)]
    kept = [WHOLE if dim in axes else letters[dim] for dim in range(rank) if keepdims or dim not in axes]
    contracted = {letters[axis]: reduction for axis in axes}
    return rule(
        node,
        f"{''.join(letters)},_->{''.join(kept)}",
        contracted=contracted,
        linear=linear,
        terms=(0,),
        local=local,
    )
