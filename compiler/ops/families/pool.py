"""Pooling: images and channels are free; over all positions, positions are contracted too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.families.convolution import SPATIAL, windows
from partc.compiler.ops.local import Local
from partc.compiler.ops.node import rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule


@op("AveragePool")
def average_pool(node: ir.Node) -> Rule | None:
    """`nc_->nc_`; windows that do not overlap are free; a sum passes."""
    spatial = windows(node, node.attributes.get_ints("kernel_shape"))
    return rule(node, f"nc{spatial}->nc{spatial}", linear="joint")


@op("LpPool")
def lp_pool(node: ir.Node) -> Rule | None:
    """`nc_->nc_`; windows that do not overlap are free."""
    spatial = windows(node, node.attributes.get_ints("kernel_shape"))
    return rule(node, f"nc{spatial}->nc{spatial}")


@op("MaxPool")
def max_pool(node: ir.Node) -> Rule | None:
    """`nc_->nc_`; windows that do not overlap are free; whole where its indices, which count through the input, are asked for."""
    if len(node.outputs) > 1:
        return None
    return lp_pool(node)


@op("GlobalAveragePool")
def global_average_pool(node: ir.Node) -> Rule | None:
    """`nchw->nc..`; hw contracted; a sum passes."""
    return _over_all(node, "sum", local=scaled)


@op("GlobalMaxPool")
def global_max_pool(node: ir.Node) -> Rule | None:
    """`nchw->nc..`; hw contracted by max."""
    return _over_all(node, "max")


op("GlobalLpPool", factors="nc_->nc_")
op("MaxRoiPool", factors=".c..,r.->rc..")
op(
    "MaxUnpool",
    factors="_,_,_->_",
    linear="joint",
    terms=(0,),
    says="whole, as its indices count through the whole output",
)


def scaled(local: Local) -> None:
    """A mean over a shard, divided by the number of shards: a term of the mean over the whole."""
    shards = 1
    for factor in local.rule.reduce:
        shards *= local.cut(factor)
    if shards == 1:
        local.same()
        return
    data = local.node.inputs[0]
    assert data is not None
    assert data.dtype is not None
    mean = f"{local.outputs[0]}.mean"
    local.same(outputs=[mean])
    share = local.constant("share", np.array(1 / shards, data.dtype.numpy()))
    local.emit("Mul", [mean, share], local.outputs[0])


def _over_all(node: ir.Node, reduction: str, local: Callable[[Local], None] | None = None) -> Rule | None:
    data = node.inputs[0]
    spatial = SPATIAL[: (rank_of(data) or 2) - 2]
    untyped = local is not None and (data is None or not data.dtype)
    return rule(
        node,
        f"nc{spatial}->nc{'.' * len(spatial)}",
        contracted=dict.fromkeys(spatial, reduction),
        whole=spatial if untyped else "",
        linear="joint" if reduction == "sum" else "",
        local=local,
    )
