"""Recurrent networks: the batch dim may be sharded, everything else is replicated."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule

gated = op(
    "RNN",
    "GRU",
    factors=".b.,_,_,_,b,.b.->..b.,.b.",
    remarks="with layout 1 the batch comes first",
    precision="low",
    host=(4,),
)


@gated.sharding
def _(node: ir.Node) -> Rule | None:
    if node.attributes.get_int("layout", 0):
        return rule(node, "b..,_,_,_,b,b..->b...,b..")
    return rule(node, ".b.,_,_,_,b,.b.->..b.,.b.")


lstm = op(
    "LSTM",
    factors=".b.,_,_,_,b,.b.,.b.,_->..b.,.b.,.b.",
    remarks="with layout 1 the batch comes first",
    precision="low",
    host=(4,),
)


@lstm.sharding
def _(node: ir.Node) -> Rule | None:
    if node.attributes.get_int("layout", 0):
        return rule(node, "b..,_,_,_,b,b..,b..,_->b...,b..,b..")
    return rule(node, ".b.,_,_,_,b,.b.,.b.,_->..b.,.b.,.b.")
