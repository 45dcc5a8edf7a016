"""Softmax and the normalizations: what is normalized over stays whole, everything else is free."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.local import Local
from partc.compiler.ops.node import LETTERS, axis_of, counted, opset_of, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Rule


@op("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: ir.Node) -> Rule | None:
    """`ax->ax`; x whole; before opset 13 all dims from the axis on."""
    rank = rank_of(node.inputs[0]) or 0
    if opset_of(node) < 13:
        axis = axis_of(node, rank, 1)
        return _whole_along(node, range(axis, rank))
    return _whole_along(node, [axis_of(node, rank, -1)])


@op("LpNormalization")
def lp_normalization(node: ir.Node) -> Rule | None:
    """`ax->ax`; x whole."""
    return _whole_along(node, [axis_of(node, rank_of(node.inputs[0]) or 0, -1)])


@op("MeanVarianceNormalization")
def mean_variance_normalization(node: ir.Node) -> Rule | None:
    """`ax->ax`; x whole."""
    rank = rank_of(node.inputs[0]) or 0
    return _whole_along(node, [counted(axis, rank) for axis in node.attributes.get_ints("axes") or (0, 2, 3)])


op("LRN", factors="n.*->n.*", says="channels whole")


@op("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_normalization(node: ir.Node) -> Rule | None:
    """`*x,_,_->*x,*.,*.`; x whole."""
    rank = rank_of(node.inputs[0]) or 0
    tail = WHOLE * (rank - axis_of(node, rank, -1))
    return rule(node, f"*{tail},_,_->*{tail},*{tail},*{tail}")


@op("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=CONTRIB)
def skip_layer_normalization(node: ir.Node) -> Rule | None:
    """`*x,*x,_,_,_->*x,*.,*.,*x`; x whole."""
    return rule(node, "*.,*.,_,_,_->*.,*.,*.,*.")


@op("GroupNormalization")
def group_normalization(node: ir.Node) -> Rule | None:
    """`nc_,c,c->nc_`; channels are cut by whole groups."""
    return rule(node, "nc_,c,c->nc_", units={"c": node.attributes.get_int("num_groups", 1)}, local=fewer_groups)


def fewer_groups(local: Local) -> None:
    """The node with as many groups as this rank has."""
    local.same(num_groups=local.node.attributes.get_int("num_groups", 1) // local.cut("c"))


op("InstanceNormalization", factors="nc_,c,c->nc_")


@op("BatchNormalization")
def batch_normalization(node: ir.Node) -> Rule | None:
    """`nc*,c,c,c,c->nc*,c,c`; in training, whose statistics are over images and positions, only channels are cut."""
    if not node.attributes.get_int("spatial", 1):
        return None
    if node.attributes.get_int("training_mode", 0) or len(node.outputs) > 1:
        return rule(node, ".c_,c,c,c,c->.c_,c,c,c,c")
    return rule(node, "nc*,c,c,c,c->nc*")


def _whole_along(node: ir.Node, axes: range | list[int]) -> Rule | None:
    letters = "".join(WHOLE if dim in axes else LETTERS[dim] for dim in range(rank_of(node.inputs[0]) or 0))
    return rule(node, f"{letters}->{letters}")
