"""Recurrent networks: the batch dim may be sharded, everything else is replicated."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule
from partc.compiler.ops.work import Dims

gated = op(
    "RNN",
    "GRU",
    factors=".b.,_,_,_,b,.b.->..b.,.b.",
    remarks="with layout 1 the batch comes first",
    precision="low",
    kernel="product",
)


@gated.multiply_adds
def _products(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """In each step each record is multiplied by the weights of the input, and by those of the state."""
    return [(*given[0][:2], *weights) for weights in given[1:3]]


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
    kernel="product",
)


lstm.multiply_adds(_products)


@lstm.sharding
def _(node: ir.Node) -> Rule | None:
    if node.attributes.get_int("layout", 0):
        return rule(node, "b..,_,_,_,b,b..,b..,_->b...,b..,b..")
    return rule(node, ".b.,_,_,_,b,.b.,.b.,_->..b.,.b.,.b.")
