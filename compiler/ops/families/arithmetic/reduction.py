"""Reductions: sharding a reduced dim leaves partial values: the sum, maximum or minimum of a shard.

What takes a root or a logarithm after its sum needs all of its axes; so do the positions of the largest. The gradient is the cotangent of
the result, spread over what was reduced. With `noop_with_empty_axes` and no axes nothing is summed, and what an op does beside its sum is
done to every element: ReduceSumSquare gives the squares, ReduceL1 absolute values, ReduceLogSum logarithms.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.families.images.pool import scaled
from partc.compiler.ops.node import FLOATING, LETTERS, axes_of, axis_of, operand, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

Reduction = Callable[[GradientBuilder, str, str, str | None], str]
"""A gradient that takes the cotangent with a dim of 1 in the place of every reduced one, the operand, and the axes where an operand."""

reduce_sum = op("ReduceSum", factors="ax->a", contracted="x", linear="joint", partial=(0,), kernel="reduction")
reduce_mean = op(
    "ReduceMean",
    factors="ax->a",
    contracted="x",
    linear="joint",
    partial=(0,),
    remarks="of integers x is replicated, and nothing linear",
    kernel="reduction",
)
reduce_l1 = op("ReduceL1", factors="ax->a", contracted="x", kernel="reduction")
reduce_sum_square = op("ReduceSumSquare", factors="ax->a", contracted="x", kernel="reduction")
reduce_max, reduce_min = (
    op(
        f"Reduce{which}",
        factors="ax->a",
        contracted={"x": which.lower()},
        remarks="of booleans x is replicated",
        precision="follow",
        kernel="reduction",
    )
    for which in ("Max", "Min")
)
reduce_l2 = op("ReduceL2", factors="ax->a", replicated="x", kernel="reduction")
reduce_log_sum = op("ReduceLogSum", factors="ax->a", replicated="x", kernel="reduction")
reduce_log_sum_exp = op("ReduceLogSumExp", factors="ax->a", replicated="x", kernel="reduction")
reduce_product = op("ReduceProd", factors="ax->a", replicated="x", kernel="reduction")
position = op(
    "ArgMax", "ArgMin", factors="ax->a", replicated="x", stops_gradient=True, precision="follow", kernel="reduction"
)


@reduce_sum.sharding
@reduce_l1.sharding
@reduce_sum_square.sharding
def _(node: ir.Node) -> Rule | None:
    return _reduced(node, "sum")


@reduce_mean.sharding
def _(node: ir.Node) -> Rule | None:
    data = operand(node, 0)
    if data is None or data.dtype not in FLOATING:
        return _reduced(node, "", linear="")
    return _reduced(node, "sum", local=scaled)


@reduce_max.sharding
@reduce_min.sharding
def _(node: ir.Node) -> Rule | None:
    data = operand(node, 0)
    boolean = data is None or data.dtype in (None, ir.DataType.BOOL)
    return _reduced(node, "" if boolean else "max" if node.op_type == "ReduceMax" else "min")


@reduce_l2.sharding
@reduce_log_sum.sharding
@reduce_log_sum_exp.sharding
@reduce_product.sharding
def _(node: ir.Node) -> Rule | None:
    return _reduced(node, "")


@position.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    return _over(node, (axis_of(node, rank, 0),), "", bool(node.attributes.get_int("keepdims", 1)))


def _keeping_dims(reduction: Reduction) -> Callable[..., str]:
    def gradient(g: GradientBuilder, dy: str, x: str, axes: str | None = None) -> str:
        return reduction(g, _with_unit_dims(g, dy, x, axes), x, axes)

    return gradient


@reduce_sum.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY along what was summed."""
    return dy if _is_noop(g, axes) else g.Expand(dy, g.shape_of(x))


@reduce_mean.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY / n along the n that were summed."""
    if _is_noop(g, axes):
        return dy
    known = _axes(g, x, axes)
    count = g.Div(g.size_of(x, like=x), g.size_of(dy, like=x)) if known is None else g.size_of(x, known, like=x)
    return g.Expand(g.Div(dy, count), g.shape_of(x))


@reduce_max.gradient
@reduce_min.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY where X is the extreme; equal ones share it."""
    if _is_noop(g, axes):
        return dy
    chosen = g.mask(g.Equal(x, _with_unit_dims(g, g.output(0), x, axes)), x)
    known = _axes(g, x, axes)
    along = axes if known is None else g.constant(np.array(known, np.int64))
    noop = int(known is None and g.attribute("noop_with_empty_axes", 0))
    return g.Mul(chosen, g.Div(dy, g.ReduceSum(chosen, along, keepdims=1, noop_with_empty_axes=noop)))


@reduce_l1.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY sign(X)."""
    return g.Mul(dy, g.Sign(x))


@reduce_l2.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY X / Y, and 0 where Y is."""
    norm = _with_unit_dims(g, g.output(0), x, axes)
    zero = g.constant(0, norm)
    share = g.Where(g.Equal(norm, zero), zero, g.Div(dy, norm))
    return g.Mul(share, x)


@reduce_sum_square.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = 2 dY X."""
    return g.Mul(g.Add(dy, dy), x)


@reduce_log_sum.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY / exp(Y)."""
    return g.Expand(g.Div(dy, g.Exp(_with_unit_dims(g, g.output(0), x, axes))), g.shape_of(x))


@reduce_log_sum_exp.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY exp(X - Y)."""
    return g.Mul(dy, g.Exp(g.Sub(x, _with_unit_dims(g, g.output(0), x, axes))))


@reduce_product.gradient
@_keeping_dims
def _(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY times the product of the other factors: the product of those that are not 0, over X; 0 where another factor is 0."""
    if _is_noop(g, axes):
        return dy
    zero, unit = g.constant(0, x), g.constant(1, x)
    known = _axes(g, x, axes)
    along = axes if known is None else g.constant(np.array(known, np.int64))
    noop = int(known is None and g.attribute("noop_with_empty_axes", 0))
    nothing = g.Equal(x, zero)
    count = g.ReduceSum(g.mask(nothing, x), along, keepdims=1, noop_with_empty_axes=noop)
    factors = g.Where(nothing, unit, x)
    product = g.ReduceProd(factors, along, keepdims=1, noop_with_empty_axes=noop)
    of_others = g.Where(g.Equal(count, zero), g.Div(product, factors), zero)
    alone = g.And(nothing, g.Equal(count, unit))
    return g.Mul(dy, g.Where(alone, product, of_others))


def _reduced(
    node: ir.Node, reduction: str, linear: str | None = None, local: Callable[[Local], None] | None = None
) -> Rule | None:
    """The rule of a node with `axes`; `reduction` is that of sharding an axis, empty where the axes stay replicated."""
    rank = rank_of(node.inputs[0]) or 0
    axes = axes_of(node, rank)
    if axes is None:
        return rule(node, "_,_->_", linear=linear)
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return rule(node, "*,_->*", linear=linear)
        axes = tuple(range(rank))
    return _over(node, axes, reduction, bool(node.attributes.get_int("keepdims", 1)), linear, local)


def _over(
    node: ir.Node,
    axes: tuple[int, ...],
    reduction: str,
    keepdims: bool,
    linear: str | None = None,
    local: Callable[[Local], None] | None = None,
) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    letters = [WHOLE if dim in axes and not reduction else LETTERS[dim] for dim in range(rank)]
    kept = [WHOLE if dim in axes else letters[dim] for dim in range(rank) if keepdims or dim not in axes]
    contracted = {letters[axis]: reduction for axis in axes}
    return rule(node, f"{''.join(letters)},_->{''.join(kept)}", contracted=contracted, linear=linear, local=local)


def _is_noop(g: GradientBuilder, axes: str | None) -> bool:
    if not g.attribute("noop_with_empty_axes", 0) or g.attribute("axes"):
        return False
    known = g.known(axes)
    return not axes or (known is not None and known.size == 0)


def _axes(g: GradientBuilder, x: str, axes: str | None) -> list[int] | None:
    """The axes counted from 0; None where only a run tells."""
    if _is_noop(g, axes):
        return []
    axes_attribute = g.attribute("axes")
    if axes_attribute is None and axes:
        known = g.known(axes)
        if known is None:
            return None
        axes_attribute = known.ravel().tolist()
    rank = g.rank(x)
    return sorted(int(axis) % rank for axis in axes_attribute) if axes_attribute else list(range(rank))


def _with_unit_dims(g: GradientBuilder, y: str, x: str, axes: str | None) -> str:
    """A result with a dim of 1 in the place of every one that was reduced."""
    if g.attribute("keepdims", 1):
        return y
    known = _axes(g, x, axes)
    return g.Unsqueeze(y, axes) if known is None else g.unsqueeze(y, *known) if known else y
