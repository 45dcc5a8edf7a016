"""The ONNX standard's attention and rotary embedding: batch and heads are free, and queries where none depends on another.

Heads of queries and of keys are sharded together, so that every rank keeps their ratio: the shards must divide the number of keys' heads; a
single head is replicated. Where heads lie in the hidden dim, the attributes that count them are divided.

For its gradient attention is taken apart into plain ops, which the engine differentiates. The probabilities are made again in the backward
pass instead of being kept, which for long sequences would be the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.autodiff.shapes import extents, joined, like
from partc.compiler.ir.graph import name_of
from partc.compiler.ops.node import Dim, dims, operand, same
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule
from partc.compiler.ops.work import Dims

HEAD_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads")
_BATCH, _HEADS, _LENGTH, _DEPTH = range(4)


attention = op(
    "Attention",
    factors="bhs.,bh..,bh.d,bhs.,bh..,bh.d->bhsd,bh..,bh.d,bhs.",
    linear="each",
    partial=(2,),
    remarks="heads by those of the keys; s is replicated where causal; linear with one output",
    precision="low",
    kernel="product",
)


@attention.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Every query with every key, and the shares of these with their values."""
    return [(2, *given[0], *given[1][-2:-1])]


@attention.sharding
def _(node: ir.Node) -> Rule | None:
    query, key = dims(operand(node, 0)), dims(operand(node, 1))
    if query is None or key is None:
        return None
    flat = len(query) == 3
    if flat:  # the heads lie in the hidden dim
        queries, keys = (node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    else:
        queries, keys = (dim if isinstance(dim, int) else 0 for dim in (query[1], key[1]))
    shared = one_letter(queries, keys, () if flat else (query[1], key[1]))
    h, k = ("h", shared) if shared else (WHOLE, WHOLE)
    windows = any(name in node.attributes for name in ("left_window_size", "right_window_size"))
    ordered = windows or node.attributes.get_int("is_causal", 0) != 0  # what a query may see depends on its place
    s = WHOLE if ordered else "s"
    sizes: dict[str, Dim] = {"b": query[0], "h": queries if flat else query[1], "s": query[1 if flat else 2]}
    mask = _aligned(dims(operand(node, 3)), sizes, f"b{h}{s}.")
    if mask is None:
        return None
    if flat:
        factors = f"b{s}{h},b.{k},b.{k},{mask},b{k}..,b{k}..,b->b{s}{h},b{k}..,b{k}..,b{h}{s}."
    else:
        factors = f"b{h}{s}.,b{k}..,b{k}.d,{mask},b{k}..,b{k}.d,b->b{h}{s}d,b{k}..,b{k}.d,b{h}{s}."
    return rule(
        node,
        factors,
        linear=None if len(node.outputs) == 1 else "",
        local=fewer_heads if flat else None,
        units={"h": keys if keys > 1 else queries} if shared and keys and queries else {},
    )


@attention.gradient
def _(g: GradientBuilder, *names: str | None) -> list[str | None]:
    """The gradient of softmax(Q Kt * scale + mask) V, written in plain ops.

    Each operand is taken under a name of its own, since one value may be several of them, or be put out as the present keys.
    """
    count = len(g.node.outputs)
    dys, operands = names[:count], names[count:]
    if len(dys) > 3 and dys[3]:
        raise NoGradient("the scores that Attention puts out have no gradient")
    if len(operands) > 6 or {"left_window_size", "right_window_size"} & set(g.node.attributes):
        raise NoGradient("Attention over a window, or of keys that are padded, has no gradient")
    first, early = len(g.scope.nodes), len(g.scope.early)
    own = [name and str(g.Identity(name)) for name in operands]
    begin = len(g.scope.nodes)
    query, key, value, *rest = own
    made = _plain(g, str(query), str(key), str(value), *rest)
    plain = g.scope.nodes[begin:]
    cotangents = {primal: dy for primal, dy in zip(made, dys, strict=False) if dy}
    wanted = [name for k, name in enumerate(own) if name and g.wants(k)]
    gradients = differentiate_nodes(plain, cotangents, wanted, scope=g.scope).gradients
    end = begin + len(plain)
    made_here = {out.name for node in g.scope.nodes[first:end] for out in node.outputs}
    # shapes of the plain ops' values are taken where these are made: in the backward pass, not in the forward one
    late = [node for node in g.scope.early[early:] if any(one and one.name in made_here for one in node.inputs)]
    g.scope.early[early:] = [node for node in g.scope.early[early:] if node not in late]
    g.scope.nodes[end:end] = late
    _drop_unread(g, first, set(gradients.values()))
    return [gradients.get(name) if name else None for name in own]


rotary_embedding = op(
    "RotaryEmbedding",
    factors="bhs.,bs.,bs.,bs->bhs.",
    linear="joint",
    partial=(0,),
    remarks="caches that positions look up are replicated",
    rounds="sums",
)


@rotary_embedding.sharding
def _(node: ir.Node) -> Rule | None:
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
        local=fewer_heads if len(source) == 3 else None,
        units={"h": heads} if len(source) == 3 and heads else {},
    )


@rotary_embedding.gradient
def _(g: GradientBuilder, dy: str, x: str, cosines: str, sines: str, positions: str | None = None) -> str:
    """dX = dY turned back by the same angles."""
    if g.wants(1) or g.wants(2):
        raise NoGradient("the angles of RotaryEmbedding have no gradient")
    names = ("interleaved", "num_heads", "rotary_embedding_dim")
    attributes = {name: g.attribute(name) for name in names if name in g.node.attributes}
    return like(g, str(g.RotaryEmbedding(dy, cosines, g.Neg(sines), positions, **attributes)), x)


def fewer_heads(local: Local) -> None:
    """The node with as many heads as this rank has; a single head of the keys is on every rank."""
    given = {name: local.node.attributes.get_int(name, 0) for name in HEAD_COUNTS}
    shards = local.num_shards("h")
    changed: dict[str, Any] = {name: count // shards for name, count in given.items() if count > 1}
    local.same(**changed)


def one_letter(queries: int, keys: int, extents: tuple[Dim, ...]) -> str:
    """The letter of the keys' heads: that of the queries', `.` for a single head; empty where heads cannot be sharded."""
    if queries and keys:
        return "" if queries % keys else "h" if keys > 1 or queries == 1 else WHOLE
    return "h" if extents and same(*extents) else ""


def _aligned(mask: tuple[Dim, ...] | None, sizes: dict[str, Dim], letters: str) -> str | None:
    """The letters of a mask that broadcasts to `letters`; None where it is not certain whether a dim does."""
    aligned = ""
    for dim, letter in zip(reversed(mask or ()), reversed(letters), strict=False):
        if letter == WHOLE or dim == 1:
            aligned = WHOLE + aligned
        elif same(dim, sizes[letter]):
            aligned = letter + aligned
        else:
            return None
    return aligned


def _plain(
    g: GradientBuilder,
    query: str,
    key: str,
    value: str,
    mask: str | None = None,
    past_key: str | None = None,
    past_value: str | None = None,
) -> tuple[str, str, str]:
    """Attention in plain ops: its output, and the keys and values with the past ones before them."""
    flat = g.rank(query) == 3
    if flat:
        query = _by_heads(g, query, g.attribute("q_num_heads"))
        key, value = (_by_heads(g, one, g.attribute("kv_num_heads")) for one in (key, value))
    present_key = str(g.Concat(past_key, key, axis=_LENGTH)) if past_key else key
    present_value = str(g.Concat(past_value, value, axis=_LENGTH)) if past_value else value
    keys, values = (_repeated(g, one, _dim(g, query, _HEADS)) for one in (present_key, present_value))
    scores = str(g.MatMul(g.Mul(query, _scale(g, query)), g.mT(keys)))
    softcap = g.attribute("softcap", 0.0)
    if softcap > 0:
        cap = g.constant(softcap, query)
        scores = str(g.Mul(g.Tanh(g.Div(scores, cap)), cap))
    allowed = _causal(g, query, keys, past_key) if g.attribute("is_causal", 0) else ""
    if mask and g.dtype(mask) == ir.DataType.BOOL:
        allowed = str(g.And(allowed, mask)) if allowed else mask
    elif mask:
        scores = str(g.Add(scores, mask))
    if allowed:
        # the most negative finite score: -inf would make a fully masked row NaN
        lowest = -65504.0 if g.dtype(query) == ir.DataType.FLOAT16 else -3e38
        scores = str(g.Where(allowed, scores, g.constant(lowest, query)))
    precision = ir.DataType(g.attribute("softmax_precision", g.dtype(query).value))
    if precision != g.dtype(query):
        scores = str(g.Cast(scores, to=precision))
    weights = str(g.Softmax(scores, axis=-1))
    if precision != g.dtype(query):
        weights = str(g.Cast(weights, to=g.dtype(query)))
    if allowed:
        weights = str(g.Where(allowed, weights, g.constant(0, query)))
    made = str(g.MatMul(weights, values))
    if flat:
        made = g.reshape(g.Transpose(made, perm=[_BATCH, _LENGTH, _HEADS, _DEPTH]), [0, 0, -1])
    return made, present_key, present_value


def _by_heads(g: GradientBuilder, x: str, heads: int) -> str:
    """(batch, length, heads * depth) as (batch, heads, length, depth)."""
    return str(g.Transpose(g.reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3]))


def _scale(g: GradientBuilder, query: str) -> str:
    """The factor of the scores: as the node says, or 1 / sqrt(depth)."""
    given, depth = g.attribute("scale"), _dim(g, query, _DEPTH)
    if given is None and not isinstance(depth, int):
        return str(g.Reciprocal(g.Sqrt(g.size_of(query, [_DEPTH], like=query))))
    return g.constant(1 / math.sqrt(int(str(depth))) if given is None else given, query)


def _repeated(g: GradientBuilder, x: str, heads: Dim) -> str:
    """Keys or values for as many heads as the queries have: each for as many in a row."""
    own = _dim(g, x, _HEADS)
    if same(own, heads):
        return x
    if not isinstance(own, int) or not isinstance(heads, int):
        raise NoGradient("Attention whose numbers of heads are dynamic has no gradient")
    spread = g.Expand(g.unsqueeze(x, 2), g.constant(np.array([1, 1, heads // own, 1, 1], np.int64)))
    return str(g.Reshape(spread, joined(g, [0, heads, -1], extents(g, x, [_DEPTH]))))


def _causal(g: GradientBuilder, query: str, keys: str, past: str | None) -> str:
    """The mask of the keys that a query may attend to: those up to its own position, counted after the past keys."""
    here, there = (g.reshape(extents(g, one, [_LENGTH]), []) for one in (query, keys))
    rows = g.Range(g.constant(0), here, g.constant(1))
    if past:
        rows = g.Add(rows, g.reshape(extents(g, past, [_LENGTH]), []))
    columns = g.Range(g.constant(0), there, g.constant(1))
    return str(g.LessOrEqual(columns, g.unsqueeze(rows, 1)))


def _dim(g: GradientBuilder, x: str, axis: int) -> Dim:
    shape = g.shape(x)
    if shape is None:
        raise NoGradient(f"the rank of {x!r} is not known")
    return shape[axis]


def _drop_unread(g: GradientBuilder, begin: int, read: set[str]) -> None:
    """Leaves out the nodes from `begin` on whose outputs are not read."""
    kept: list[ir.Node] = []
    for node in reversed(g.scope.nodes[begin:]):
        if any(out.name in read for out in node.outputs):
            kept.append(node)
            read |= {name_of(one) for one in node.inputs if one is not None}
    g.scope.nodes[begin:] = kept[::-1]
