"""Running sums and products, and the maximum along an axis: the axis is replicated, every other dim is free.

Fourier transforms along an axis: every other dim is free.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.autodiff.shapes import like
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.families.shapes.slice import replicated_operands
from partc.compiler.ops.node import LETTERS, axis_of, constant_ints, counted, operand, opset_of, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

top_k = op("TopK", factors="ax,_->a.,a.", replicated="x", precision="follow", kernel="sort")


@top_k.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    letters = along(rank, axis_of(node, rank, -1))
    return rule(node, f"{letters},_->{letters},{letters}")


@top_k.gradient
def _(g: GradientBuilder, dy: str | None, _: str | None, x: str, k: str) -> str | None:
    """dX = dY scattered to the positions of the largest elements, zeros elsewhere."""
    axis = axis_of(g.node, g.rank(x), -1)
    return dy and like(g, str(g.ScatterElements(g.zeros(x), g.output(1), dy, axis=axis)), x)


cumulated_sum = op("CumSum", factors="ax,_->ax", replicated="x", linear="joint", partial=(0,), kernel="reduction")

cumulated_product = op("CumProd", factors="ax,_->ax", replicated="x", kernel="reduction")


@cumulated_sum.sharding
@cumulated_product.sharding
def _(node: ir.Node) -> Rule | None:
    axis, rank = constant_ints(node, 1), rank_of(node.inputs[0]) or 0
    if not axis:
        return rule(node, "_,_->_")
    letters = along(rank, counted(axis[0], rank))
    return rule(node, f"{letters},_->{letters}")


@cumulated_sum.gradient
def _(g: GradientBuilder, dy: str, x: str, axis: str) -> str:
    """dX = the sums of dY from the other end."""
    exclusive, reverse = g.attribute("exclusive", 0), g.attribute("reverse", 0)
    return str(g.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse))


def along(rank: int, axis: int) -> str:
    """A letter a dim, but for one axis, which is replicated."""
    return LETTERS[:axis] + WHOLE + LETTERS[axis + 1 : rank]


dft = op(
    "DFT",
    factors="*a.,_,_->*a.",
    linear="joint",
    partial=(0,),
    remarks="the transformed axis is replicated",
    rounds="sums",
)


@dft.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    axis = axis_of(node, rank, 1)
    if opset_of(node) >= 20:
        given = (-2,) if operand(node, 2) is None else constant_ints(node, 2)
        if given is None:
            return None
        axis = counted(given[0], rank)
    letters = but_axes(rank, (axis, rank - 1))
    return Rule((letters, *replicated_operands(node)), (letters,))


op("STFT", factors="b_,_,_,_->b...", linear="each", partial=(0, 2), rounds="sums")
