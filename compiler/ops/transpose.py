"""Ops that permute elements: Transpose, and the exchange of depth and space."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.factors import rule
from partc.compiler.ops.operands import LETTERS, counted, rank_of
from partc.compiler.ops.rule import Rule
from partc.compiler.ops.table import op


@op("Transpose")
def transpose(node: ir.Node) -> Rule | None:
    """`ab->ba`; a sum passes."""
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    order = node.attributes.get_ints("perm") or tuple(reversed(range(rank)))
    letters = LETTERS[:rank]
    return Rule((letters,), ("".join(letters[counted(axis, rank)] for axis in order),), linear="joint")


@op("DepthToSpace")
def depth_to_space(node: ir.Node) -> Rule | None:
    """`nchw->nchw`; a sum passes; channels only in mode CRD, where they are major in the input's depth."""
    crd = node.attributes.get_string("mode", "DCR") == "CRD"
    return rule(node, "nchw->nchw" if crd else "n.hw->n.hw", linear="joint")


op("SpaceToDepth", factors="n.hw->n.hw", linear="joint", says="a sum passes")
