"""`ShardedCacheAttention`: attention of a step over a decoder's caches, by each of the ranks that share their entries, over its own ones.

    y [p, b, t, h d], next_k, next_v, scores [p, b, h, t, total]
        = ShardedCacheAttention(q [b, t, h d], k, v [b, t, g d], cache_k, cache_v [b, g, p r, d], ends [p, b], total)

Each shard of r entries is a cache of its own: the new keys and values are appended to it, and `ends` is the index of the last of them, for
each slot. A token attends the entries of the shard up to its own. `scores` are those before the Softmax, of `total` entries; beyond a
token's own entry they are any numbers. `rewrite/generation/sharded_caches.py` merges the results.

On a rank it is onnxruntime's fused attention, so the entries are one factor with as many shards as p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ops.node import dims
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import OWN, Local, Rule
from partc.compiler.ops.work import Dims

SHARDED_ATTENTION, ENTRIES = "ShardedCacheAttention", "v"
_FIRST = np.array([0], np.int64)

sharded = op(
    SHARDED_ATTENTION,
    domain=OWN,
    factors="b.h,b.h,b.h,bhv.,bhv.,vb,->vb.h,bhv.,bhv.,vbh..",
    remarks="v has as many shards as its first result",
    kernel="product",
)


def is_sharded_attention(node: ir.Node) -> bool:
    """Whether a node is a `ShardedCacheAttention`."""
    return node.domain == OWN and node.op_type == SHARDED_ATTENTION


@sharded.multiply_adds
def _(node: ir.Node, operands: Sequence[Dims], result: Dims) -> list[Dims]:
    """Each query is multiplied with each key of its shard, and the shares of the keys with their values."""
    return [(2, *operands[0], *operands[3][-2:-1])]


@sharded.sharding
def _(node: ir.Node) -> Rule | None:
    if dims(node.inputs[0]) is None:
        return None
    keys = node.attributes.get_int("kv_num_heads", 0)
    cache = f"bh{ENTRIES}."
    return Rule(
        ("b.h", "b.h", "b.h", cache, cache, f"{ENTRIES}b", ""),
        (f"{ENTRIES}b.h", cache, cache, f"{ENTRIES}bh.."),
        units={"h": keys},
        local=_fused,
    )


@sharded.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    query, keys, values, ends = (node.inputs[k] for k in (0, 3, 4, 5))
    if query is None or keys is None or values is None or ends is None or query.shape is None or ends.shape is None:
        return
    heads = node.attributes.get_int("num_heads", 0)
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([ends.shape[0], *query.shape]), query.dtype)
    for cache, following in ((keys, node.outputs[1]), (values, node.outputs[2])):
        ctx.set_shape_and_dtype(following, ir.Shape(cache.shape or []), cache.dtype)
    scores = [ends.shape[0], query.shape[0], heads, query.shape[1], ctx.new_symbolic_dim()]
    ctx.set_shape_and_dtype(node.outputs[3], ir.Shape(scores), query.dtype)


def _fused(local: Local) -> None:
    """The fused op over the one shard of this rank."""
    tensor, count = local.node.attributes, local.num_shards("h")
    ends = local.emit("Squeeze", [local.inputs[5], local.constant("first", _FIRST)], "ends_of_rank")
    inputs = [*local.inputs[:5], ends, local.inputs[6]]
    attributes: dict[str, Any] = {name: tensor.get_int(name, 0) // count for name in ("num_heads", "kv_num_heads")}
    attributes |= {name: tensor[name].as_float() for name in ("scale", "softcap") if name in tensor}
    attributes["qk_output"] = 1
    mixed, scores = f"{local.outputs[0]}.of_rank", f"{local.outputs[3]}.of_rank"
    made = (mixed, local.outputs[1], local.outputs[2], scores)
    local.give("GroupQueryAttention", inputs, *made, domain=CONTRIB, **attributes)
    for one, output in ((mixed, local.outputs[0]), (scores, local.outputs[3])):
        local.give("Unsqueeze", [one, local.constant("first", _FIRST)], output)
