"""`RingAttention`: attention whose keys and values pass from rank to rank; `lower/ring.py` writes it as plain ops and messages, on one rank
too.

    RingAttention(q [b, h, s, d], k [b, g, s, d], v [b, g, s, e], mask) {scale, causal, hidden, tokens}    softmax(scale q kT, masked) v

The tokens of queries and of keys are one factor: a rank has the same shard of both. `causal`: each token sees itself and earlier ones, and
there is no mask. `tokens`: the number of ranks over which tokens are in folded order (`rewrite/fold.py`), 0 in natural order. A boolean
mask sets hidden scores to `hidden`; a mask of numbers is added to the scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ops.node import dims, operand
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, WHOLE, Rule
from partc.compiler.ops.work import Dims

RING = "RingAttention"
ring = op(
    RING,
    domain=OWN,
    factors="bhs.,bhs.,bhs.,bhs.->bhs.",
    remarks="tokens of queries and keys are one factor",
    kernel="product",
)


def is_ring(node: ir.Node) -> bool:
    """Whether a node is a `RingAttention`."""
    return node.domain == OWN and node.op_type == RING


@ring.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Each query is multiplied with each key, and the weights of the keys with their values."""
    return [(2, *given[0], given[1][-2])]


@ring.sharding
def _(node: ir.Node) -> Rule | None:
    from partc.compiler.ops.families.neural.attention import one_letter  # it knows the engine of gradients

    query, key, mask = dims(node.inputs[0]), dims(node.inputs[1]), dims(operand(node, 3))
    if query is None or key is None:
        return None
    queries, keys = (dim if isinstance(dim, int) else 0 for dim in (query[1], key[1]))
    k = one_letter(queries, keys, ())
    h, k = ("h", k) if k else (WHOLE, WHOLE)
    letters = "".join(
        WHOLE if dim == 1 else letter for dim, letter in zip(reversed(mask or ()), f".s{h}b", strict=False)
    )
    inputs = (f"b{h}s.", f"b{k}s.", f"b{k}s.", *([letters[::-1]] if mask is not None else []))
    return Rule(inputs, (f"b{h}s.",), units={"h": keys} if k == "h" else {})


@ring.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    q, v = node.inputs[0], node.inputs[2]
    if q is not None and v is not None and q.shape is not None and v.shape is not None:
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([*q.shape[:3], v.shape[3]]), q.dtype)
