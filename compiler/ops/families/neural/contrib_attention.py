"""Attention of onnxruntime's own domain: batch and heads are free, and the attributes that count heads are divided.

Where weights or a bias hold queries, keys and values in a row, a rank takes its heads out of each of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.families.neural.attention import fewer_heads, one_letter
from partc.compiler.ops.node import Dim, dims, operand, same
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Local, Rule
from partc.compiler.ops.work import Dims

multi_head_attention = op(
    "MultiHeadAttention",
    domain=CONTRIB,
    factors="bsh,b.h,b.h,.,b.,bhs.,bh..,bh..->bsh,bh..,bh..",
    linear="each",
    partial=(2,),
    remarks="s free unless causal or cached; packed operands are replicated; linear without bias and cache",
    kernel="product",
)


@multi_head_attention.multiply_adds
def _products(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Every query with every key, and the shares of these with their values."""
    keys = given[1] if len(given) > 1 and given[1] else given[0]
    return [(2, *given[0], *keys[-2:-1])]


@multi_head_attention.sharding
def _(node: ir.Node) -> Rule | None:
    query, key, value = (dims(operand(node, k)) for k in range(3))
    heads = node.attributes.get_int("num_heads", 0)
    if query is None or len(node.inputs) > 8 or heads < 1:
        return None
    cached = operand(node, 6) is not None or len(node.outputs) > 1
    free = WHOLE if cached or node.attributes.get_int("unidirectional", 0) != 0 else "s"
    if len(query) != 3 or key is None or value is None or len(key) == 5:
        return None
    operands = [f"b{free}h", _keys(key), _keys(value)]
    bias = dims(operand(node, 3))
    if bias is not None and not _thirds(bias, heads):
        return None
    padding = _padding(dims(operand(node, 4)), query)
    extra = _bias_of_scores(dims(operand(node, 5)), query, heads, free)
    if padding is None or extra is None:
        return None
    operands += [WHOLE, padding, extra, "bh..", "bh.."]
    return Rule(
        _present(node, operands),
        (f"b{free}h", "bh..", "bh..")[: len(node.outputs)],
        linear=None if bias is None and not cached else "",
        local=fewer_heads if bias is None else _local_heads,
        units={"h": heads},
    )


group_query_attention = op(
    "GroupQueryAttention",
    domain=CONTRIB,
    factors="b.h,b.h,b.h,bh..,bh..,b,,_,_,b.,bh..,h,h,h->b.h,bh..,bh..,bh..",
    remarks="heads by those of the keys; packed heads are replicated",
    kernel="product",
)


group_query_attention.multiply_adds(_products)


@group_query_attention.sharding
def _(node: ir.Node) -> Rule | None:
    query, key = dims(operand(node, 0)), dims(operand(node, 1))
    queries, keys = (node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads"))
    if query is None or len(node.inputs) > 14:
        return None
    shared = one_letter(queries, keys, ()) if key is not None else ""
    heads, key_heads = ("h", shared) if shared else (WHOLE, WHOLE)
    extra = _bias_of_scores(dims(operand(node, 10)), query, queries, WHOLE)
    if extra is None:
        return None
    cache = f"b{key_heads}.."
    lengths = "b" + WHOLE * (len(dims(operand(node, 5)) or (0,)) - 1)
    total = WHOLE * len(dims(operand(node, 6)) or ())
    operands = [f"b.{heads}", f"b.{key_heads}", f"b.{key_heads}", cache, cache, lengths, total, "..", "..", "b."]
    scales = [
        key_heads if node.attributes.get_string(f"{side}_quant_type") == "PER_CHANNEL" else WHOLE for side in "kv"
    ]
    return Rule(
        _present(node, [*operands, extra.replace("h", heads), heads, *scales]),
        (f"b.{heads}", cache, cache, f"b{heads}..")[: len(node.outputs)],
        local=fewer_heads,
        units={"h": keys if keys > 1 else queries} if shared else {},
    )


packed_attention = op(
    "Attention",
    domain=CONTRIB,
    factors="b..,_,_,b.,.bh..,bh..->b.h,.bh..",
    remarks="heads by their number; each rank takes its columns of the weights",
    kernel="product",
)


@packed_attention.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """The product with the packed weights; then every query with every key, and the shares of these with their values."""
    return [(*given[0], *given[1][-1:]), (2, *made, *given[0][1:2])]


@packed_attention.sharding
def _(node: ir.Node) -> Rule | None:
    source, weights = dims(node.inputs[0]), dims(operand(node, 1))
    heads = node.attributes.get_int("num_heads", 0)
    if source is None or weights is None or len(source) != 3 or heads < 1 or len(node.inputs) > 6:
        return None
    if not _thirds(weights[1:], heads) or node.attributes.get_int("do_rotary", 0) != 0:
        return None
    padding = _padding(dims(operand(node, 3)), source)
    extra = _bias_of_scores(dims(operand(node, 5)), source, heads, WHOLE)
    if padding is None or extra is None:
        return None
    return Rule(
        _present(node, ["b..", "..", WHOLE, padding, ".bh..", extra]),
        ("b.h", ".bh..")[: len(node.outputs)],
        units={"h": heads},
    )


rotary_embedding = op(
    "RotaryEmbedding",
    domain=CONTRIB,
    factors="bhs.,bs,..,..->bhs.",
    linear="joint",
    partial=(0,),
    remarks="s is replicated where its first position is given",
)


@rotary_embedding.sharding
def _(node: ir.Node) -> Rule | None:
    source, positions = dims(node.inputs[0]), dims(operand(node, 1))
    cache = dims(operand(node, 2))
    if source is None or positions is None or cache is None or node.attributes.get_int("is_packed_batching", 0) != 0:
        return None
    free = "s" if len(positions) == 2 else WHOLE
    heads = node.attributes.get_int("num_heads", 0)
    if len(source) == 3 and not heads and isinstance(source[2], int) and isinstance(cache[1], int):
        heads = source[2] // (2 * cache[1])
    letters = f"b{free}{'h' if heads else WHOLE}" if len(source) == 3 else f"bh{free}."
    return Rule(
        (letters, "bs" if len(positions) == 2 else WHOLE, "..", ".."),
        (letters,),
        local=fewer_heads,
        units={"h": heads} if heads else {},
    )


def _keys(shape: Sequence[Dim]) -> str:
    """Keys or values, flat or by heads."""
    return "bh.." if len(shape) == 4 else "b.h"


def _present(node: ir.Node, letters: Sequence[str | None]) -> tuple[str | None, ...]:
    return tuple(None if v is None else text for v, text in zip(node.inputs, letters, strict=False))


def _padding(shape: Sequence[Dim] | None, query: Sequence[Dim]) -> str | None:
    """The letters of a padding mask, which is by image where its first dim is the batch; None for lengths in a row."""
    if shape is None:
        return ""
    return "b" + WHOLE * (len(shape) - 1) if same(shape[0], query[0]) else None


def _bias_of_scores(shape: Sequence[Dim] | None, query: Sequence[Dim], heads: int, free: str) -> str | None:
    """The letters of what is added to the scores; None where it is not certain whether the batch or the heads broadcast."""
    if shape is None:
        return ""
    if len(shape) != 4 or not (shape[0] == 1 or same(shape[0], query[0])) or shape[1] not in (1, heads):
        return None
    return (WHOLE if shape[0] == 1 else "b") + (WHOLE if shape[1] == 1 else "h") + free + WHOLE


def _thirds(shape: Sequence[Dim], heads: int) -> bool:
    """Whether queries, keys and values lie in a row in equal parts of whole heads."""
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] % (3 * heads) == 0


def _columns(local: Local, extent: int) -> str:
    """The positions of this rank's heads in packed rows of queries, keys and values."""
    part, shards = extent // 3, local.num_shards("h")
    here = np.arange(part // shards) + local.index("h") * (part // shards)
    return local.constant("columns", np.concatenate([here + part * k for k in range(3)]).astype(np.int64))


def _local_heads(local: Local) -> None:
    """Fewer heads, with their part of the bias."""
    bias = dims(local.node.inputs[3]) or (0,)
    if local.num_shards("h") == 1:
        local.same()
        return
    assert isinstance(bias[0], int)
    part = local.emit("Gather", [local.inputs[3], _columns(local, bias[0])], "bias", axis=0)
    count = local.node.attributes.get_int("num_heads", 1) // local.num_shards("h")
    local.same([*local.inputs[:3], part, *local.inputs[4:]], num_heads=count)


@packed_attention.local
def _(local: Local) -> None:
    """Fewer heads, with their columns of the weights and of the bias."""
    if local.num_shards("h") == 1:
        local.same()
        return
    weights = dims(local.node.inputs[1]) or (0, 0)
    assert isinstance(weights[1], int)
    columns = _columns(local, weights[1])
    inputs = list(local.inputs)
    inputs[1] = local.emit("Gather", [inputs[1], columns], "weights", axis=1)
    if len(inputs) > 2 and inputs[2]:
        inputs[2] = local.emit("Gather", [inputs[2], columns], "bias", axis=0)
    shards = local.num_shards("h")
    changed: dict[str, Any] = {"num_heads": local.node.attributes.get_int("num_heads", 1) // shards}
    sizes = local.node.attributes.get_ints("qkv_hidden_sizes")
    if sizes:
        changed["qkv_hidden_sizes"] = [size // shards for size in sizes]
    local.same(inputs, **changed)
