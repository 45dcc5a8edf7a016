"""Concat and Split: the axis is replicated, every other dim may be sharded."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.autodiff.shapes import extents, joined, like
from partc.compiler.ops.node import LETTERS, axis_of, dims, operand, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

concat = op(
    "Concat", factors="a.,a.->a.", linear="joint", remarks="the axis is replicated", precision="widest", kernel="layout"
)


@concat.sharding
def _(node: ir.Node) -> Rule | None:
    shapes = [dims(value) for value in node.inputs]
    first = shapes[0]
    if first is None:
        return None
    axis = axis_of(node, len(first), 1)
    letters = ""
    for k, dim in enumerate(first):
        sure = all(shape is not None and same(dim, shape[k]) for shape in shapes) if len(shapes) > 1 else True
        letters += LETTERS[k] if k != axis and sure else WHOLE
    return Rule((letters,) * len(shapes), (letters,))


@concat.gradient
def _(g: GradientBuilder, dy: str, *parts: str) -> list[str]:
    """The part of dY that each operand has made."""
    axis = axis_of(g.node, g.rank(dy), 1)
    if len(parts) == 1:
        return [dy]
    sizes = joined(g, *(extents(g, part, [axis]) for part in parts))
    made = g.Split(dy, sizes, axis=axis, outputs=len(parts))
    return [like(g, one, part) for one, part in zip(made, parts, strict=True)]


split = op(
    "Split",
    factors="a.,_->a.,a.",
    linear="joint",
    partial=(0,),
    remarks="the axis is replicated",
    precision="follow",
    kernel="layout",
)


@split.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    letters = but_axes(rank, (axis_of(node, rank, 0),))
    sizes = () if len(node.inputs) < 2 else (None if operand(node, 1) is None else WHOLE,)
    return Rule((letters, *sizes), (letters,) * len(node.outputs))


@split.gradient
def _(g: GradientBuilder, *names: str | None) -> str:
    """dX = the cotangents of the parts one after the other, zeros for a part that is not read."""
    count = len(g.node.outputs)
    axis = axis_of(g.node, g.rank(str(names[count])), 0)
    parts = [dy or g.zeros(g.output(k)) for k, dy in enumerate(names[:count])]
    return like(g, str(g.Concat(*parts, axis=axis)), str(names[count]))


def but_axes(rank: int, axes: tuple[int, ...]) -> str:
    """A letter a dim; the axes are replicated."""
    return "".join(WHOLE if k in axes else LETTERS[k] for k in range(rank))
