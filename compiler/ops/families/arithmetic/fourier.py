"""Fourier transforms along an axis: every other dim is free."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.node import axis_of, constant_ints, counted, operand, opset_of, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

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
    rest = tuple(None if value is None else WHOLE * (rank_of(value) or 0) for value in node.inputs[1:])
    return Rule((letters, *rest), (letters,))


op("STFT", factors="b_,_,_,_->b...", linear="each", partial=(0, 2), rounds="sums")
