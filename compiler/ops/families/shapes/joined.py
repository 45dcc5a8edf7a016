"""`JoinTokens` and `SplitTokens`: Reshapes that join tokens with dims major to them, and their inverse, in an order of which each rank has
one run.

    JoinTokens(x [b, s, ...], shape) {tokens: p}    x as [b, p, s/p, ...], then as [p, b, s/p, ...], then reshaped to [b*s, ...]

Only `b` of a plain Reshape's result can be sharded: the tokens of a rank are in as many runs as there are records. In this order the joined
dim is sharded by the p ranks along the tokens first, then by those along the records, and a rank's node is a plain Reshape of its shard.
Other ops must treat all places of a joined dim alike (`rewrite/joined_tokens.py`).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ops.families.shapes.reshape import local_target
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, WHOLE, Local, Rule

JOIN, SPLIT = "JoinTokens", "SplitTokens"
JOINED, TOKENS, RECORDS = "J", "S", "B"
"""The factors of the joined dim and of two of its parts; a part between them stays whole."""
joined = op(
    JOIN,
    SPLIT,
    domain=OWN,
    factors="_,_->_",
    remarks="a joined dim has the shards of tokens, then those of records",
    precision="follow",
    kernel="view",
)


def is_joined(node: ir.Node) -> bool:
    """Whether a node joins tokens with other dims, or splits them."""
    return node.domain == OWN and node.op_type in (JOIN, SPLIT)


@joined.sharding
def _(node: ir.Node) -> Rule:
    source, target = node.attributes.get_strings("letters") or ()
    reduce = dict.fromkeys((TOKENS, RECORDS) if node.op_type == JOIN else JOINED, "")
    return Rule((source, WHOLE), (target,), reduce=reduce, joined=(JOINED, TOKENS, RECORDS))


@joined.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    out, x = node.outputs[0], node.inputs[0]
    assert x is not None
    ctx.set_shape_and_dtype(out, out.shape, x.dtype)


@joined.local
def _(local: Local) -> None:
    zeros = local.node.attributes.get_int("allowzero", 0)
    local.give("Reshape", [local.inputs[0], local_target(local)], local.outputs[0], allowzero=zeros)
