"""Attention of the standard and rotary embedding: batch and heads are free, and queries where none waits for another.

Heads of queries and of keys are cut together, so that every rank keeps their ratio: a cut must divide the number of the
keys' heads; where there is but one, each rank has it whole. Where heads lie in the hidden dim, the attributes that count
them are divided.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from partc.compiler.ops.local import Local
from partc.compiler.ops.node import Dim, dims, operand, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule


@op("Attention")
def attention(node: ir.Node) -> Rule | None:
    """`bhs.,bh..,bh.d,bhs.,bh..,bh.d->bhsd,bh..,bh.d,bhs.`; heads by those of the keys; a sum passes in V; causal s whole."""
    query, key, value = (dims(operand(node, k)) for k in range(3))
    if query is None or key is None or value is None:
        return None
    flat = len(query) == 3
    if flat:
        queries, keys = (node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    else:
        queries, keys = (shape[1] if isinstance(shape[1], int) else 0 for shape in (query, key))
    sizes: dict[str, Dim] = {"b": query[0], "h": queries if flat else query[1], "s": query[1 if flat else 2]}
    shared = one_letter(queries, keys, () if flat else (query[1], key[1]))
    heads, key_heads = ("h", shared) if shared else (WHOLE, WHOLE)
    ordered = any(name in node.attributes for name in ("left_window_size", "right_window_size"))
    free = WHOLE if ordered or node.attributes.get_int("is_causal", 0) != 0 else "s"
    mask = _aligned(dims(operand(node, 3)), {**sizes}, f"b{heads}{free}.")
    if mask is None:
        return None
    cache = f"b{key_heads}.."
    deep = f"b{key_heads}.d" if not flat else cache
    if flat:
        operands = [f"b{free}{heads}", f"b.{key_heads}", f"b.{key_heads}"]
        made = [f"b{free}{heads}", cache, cache, f"b{heads}{free}."]
    else:
        operands = [f"b{heads}{free}.", cache, deep]
        made = [f"b{heads}{free}d", cache, deep, f"b{heads}{free}."]
    operands += [mask, cache, deep, "b"]
    inputs = tuple(None if v is None else text for v, text in zip(node.inputs, operands, strict=False))
    if any(v is not None and len(dims(v) or ()) != len(t or "") for v, t in zip(node.inputs, inputs, strict=True)):
        return None
    return Rule(
        inputs,
        tuple(made[: len(node.outputs)]),
        linear="each" if len(node.outputs) == 1 else "",
        terms=(2,),
        local=fewer_heads if flat else None,
        units={"h": keys if keys > 1 else queries} if shared and keys and queries else {},
    )


@op("RotaryEmbedding")
def rotary_embedding(node: ir.Node) -> Rule | None:
    """`bhs.,bs.,bs.,bs->bhs.`; caches that positions look up whole; a sum passes in X."""
    source = dims(node.inputs[0])
    if source is None:
        return None
    looked_up = operand(node, 3) is not None
    cache = ".." if looked_up else "bs."
    caches = dims(node.inputs[1])
    if caches is None or len(caches) != len(cache):
        return None
    at = 1 if len(source) == 3 else 2
    if not looked_up and not (same(caches[0], source[0]) and same(caches[1], source[at])):
        return None
    heads = node.attributes.get_int("num_heads", 0)
    letters = ("bsh" if heads else "bs.") if len(source) == 3 else "bhs."
    return Rule(
        (letters, cache, cache, *(["bs" if looked_up else None] if len(node.inputs) > 3 else [])),
        (letters,),
        linear="joint",
        terms=(0,),
        local=fewer_heads if len(source) == 3 else None,
        units={"h": heads} if len(source) == 3 and heads else {},
    )


HEAD_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads")


def fewer_heads(local: Local) -> None:
    """The node with as many heads as this rank has; a single head of the keys is on every rank."""
    given = {name: local.node.attributes.get_int(name, 0) for name in HEAD_COUNTS}
    shards = local.cut("h")
    changed: dict[str, Any] = {name: count // shards for name, count in given.items() if count > 1}
    local.same(**changed)


def one_letter(queries: int, keys: int, extents: tuple[Dim, ...]) -> str:
    """The letter of the keys' heads: that of the queries', `.` for a single head; empty where heads cannot be cut."""
    if queries and keys:
        return "" if queries % keys else "h" if keys > 1 or queries == 1 else WHOLE
    return "h" if extents and same(*extents) else ""


def _aligned(mask: tuple[Dim, ...] | None, sizes: dict[str, Dim], letters: str) -> str | None:
    """The letters of a mask that broadcasts to `letters`; None where it is not certain whether a dim does."""
    found = ""
    for dim, letter in zip(reversed(mask or ()), reversed(letters), strict=False):
        if letter == WHOLE or dim == 1:
            found = WHOLE + found
        elif same(dim, sizes[letter]):
            found = letter + found
        else:
            return None
    return found
