"""Transforms along an axis, and matrices of which each is one problem: other dims are free."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.families.join import but_axes
from partc.compiler.ops.node import axis_of, constant_ints, counted, operand, opset_of, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Rule

op("Det", factors="*..->*", says="the matrix whole")
op("Inverse", domain=CONTRIB, factors="*..->*..", says="the matrix whole")


@op("DFT")
def dft(node: ir.Node) -> Rule | None:
    """`*a.,_,_->*a.`; the transformed axis whole; a sum passes."""
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
    return Rule((letters, *rest), (letters,), linear="joint", terms=(0,))


@op("STFT")
def stft(node: ir.Node) -> Rule | None:
    """`b_,_,_,_->b...`; a sum passes in the signal or in the window."""
    return rule(node, "b_,_,_,_->b...", linear="each", terms=(0, 2))
