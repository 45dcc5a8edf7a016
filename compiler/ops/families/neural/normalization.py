"""Normalizations: the dims over which they normalize are replicated, everything else is free.

All of these take x to (x - mean) / deviation, times a scale. With x^ the normalized value and w = dY scale, over what is normalized:

    dX = (w - mean(w) - x^ mean(w x^)) / deviation     dScale = sum(dY x^)     dB = sum(dY)

Softmax and its like: the axis over which they normalize is replicated, everything else is free.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import LETTERS, axis_of, counted, opset_of, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Local, Rule

_OLD = "before opset 13 all dims from the axis on"

softmax = op("Softmax", factors="ax->ax", replicated="x", remarks=_OLD, kernel="normalization")
log_softmax = op("LogSoftmax", factors="ax->ax", replicated="x", remarks=_OLD, kernel="normalization")
hardmax = op("Hardmax", factors="ax->ax", replicated="x", remarks=_OLD, precision="follow", rounds="sums")

op(
    "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss",
    why="written out as reductions, which are cut, where operators are sharded and in training",
)


@softmax.sharding
@log_softmax.sharding
@hardmax.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    if opset_of(node) < 13:
        axis = axis_of(node, rank, 1)
        return replicated_along(node, range(axis, rank))
    return replicated_along(node, [axis_of(node, rank, -1)])


@softmax.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = Y (dY - sum(dY Y))."""
    y = g.output(0)
    part = g.Mul(dy, y)
    return g.Sub(part, g.Mul(y, g.sum(part, _along(g, x), keepdims=True)))


@log_softmax.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY - exp(Y) sum(dY)."""
    return g.Sub(dy, g.Mul(g.Exp(g.output(0)), g.sum(dy, _along(g, x), keepdims=True)))


def replicated_along(node: ir.Node, axes: range | list[int]) -> Rule | None:
    """The rule of a unary op that needs some axes replicated."""
    letters = "".join(WHOLE if dim in axes else LETTERS[dim] for dim in range(rank_of(node.inputs[0]) or 0))
    return rule(node, f"{letters}->{letters}")


def _along(g: GradientBuilder, x: str) -> list[int]:
    rank = g.rank(x)
    if opset_of(g.node) < 13:
        return list(range(g.attribute("axis", 1) % rank, rank))
    return [g.attribute("axis", -1) % rank]


lp_normalization = op("LpNormalization", factors="ax->ax", replicated="x", kernel="normalization")


@lp_normalization.sharding
def _(node: ir.Node) -> Rule | None:
    return replicated_along(node, [axis_of(node, rank_of(node.inputs[0]) or 0, -1)])


mean_variance_normalization = op("MeanVarianceNormalization", factors="ax->ax", replicated="x", kernel="normalization")


@mean_variance_normalization.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    return replicated_along(node, [counted(axis, rank) for axis in node.attributes.get_ints("axes") or (0, 2, 3)])


op("LRN", factors="n.*->n.*", remarks="channels are replicated", kernel="normalization")


_LAST = "*x,_,_->*x,*.,*."

layer_normalization = op(
    "LayerNormalization", factors=_LAST, replicated="x", gradient_outputs=3, kernel="normalization"
)
rms_normalization = op(
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    factors=_LAST,
    replicated="x",
    gradient_outputs=1,
    kernel="normalization",
)


@layer_normalization.sharding
@rms_normalization.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    tail = WHOLE * (rank - axis_of(node, rank, -1))
    return rule(node, f"*{tail},_,_->*{tail},*{tail},*{tail}")


@layer_normalization.gradient
def _(
    g: GradientBuilder,
    dy: str | None,
    dmean: str | None,
    dinverse: str | None,
    x: str,
    scale: str,
    bias: str | None = None,
) -> Sequence[str | None]:
    """dX of the module's formula, plus (dMean - dInverse x^ / deviation^2) / n of the second and third output; dScale = dY x^, dB = dY.

    x^ is made of the node's own statistics where they are in the type of x.
    """
    rank = g.rank(x)
    axes = list(range(g.attribute("axis", -1) % rank, rank))
    if g.dtype(x) == ir.DataType.FLOAT:
        centered, inverse = g.Sub(x, g.output(1)), g.output(2)
    else:
        centered, inverse = _centered(g, x, axes)
    normal = g.Mul(centered, inverse)
    terms: list[str] = []
    if g.wants(0):
        terms += [_through(g, g.Mul(dy, scale), normal, inverse, axes)] if dy else []
        share = g.Reciprocal(g.size_of(x, axes, like=x))
        if dmean:
            terms.append(g.Expand(g.Mul(_as(g, dmean, x), share), g.shape_of(x)))
        if dinverse:
            slope = g.Mul(_as(g, dinverse, x), g.Mul(g.Mul(inverse, inverse), share))
            terms.append(g.Neg(g.Mul(slope, normal)))
    dx = functools.reduce(g.Add, terms) if terms else None
    return dx, g.Mul(dy, normal) if dy and g.wants(1) else None, dy


def _as(g: GradientBuilder, x: str, like: str) -> str:
    """The value in the type of another one: statistics are float32 beside values of 16 bits."""
    return x if g.dtype(x) == g.dtype(like) else g.CastLike(x, like)


@rms_normalization.gradient
def _(g: GradientBuilder, dy: str, x: str, scale: str) -> Sequence[str | None]:
    """x^ = x / r, r = sqrt(mean(x x)): dX = (w - x^ mean(w x^)) / r, dScale = dY x^."""
    rank = g.rank(x)
    axes = g.constant(np.arange(g.attribute("axis", -1) % rank, rank))
    inverse = _inverse_root(g, g.ReduceMean(g.Mul(x, x), axes, keepdims=1), x)
    normal = g.Mul(x, inverse)
    w = g.Mul(dy, scale)
    dx = g.Mul(g.Sub(w, g.Mul(normal, g.ReduceMean(g.Mul(w, normal), axes, keepdims=1))), inverse)
    return dx, g.Mul(dy, normal) if g.wants(1) else None


skip_layer_normalization = op(
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    domain=CONTRIB,
    factors="*x,*x,_,_,_->*x,*.,*.,*x",
    replicated="x",
    kernel="normalization",
)


@skip_layer_normalization.sharding
def _(node: ir.Node) -> Rule | None:
    return rule(node, "*.,*.,_,_,_->*.,*.,*.,*.")


group_normalization = op(
    "GroupNormalization", factors="nc_,c,c->nc_", remarks="channels are sharded by whole groups", kernel="normalization"
)


@group_normalization.sharding
def _(node: ir.Node) -> Rule | None:
    return rule(node, "nc_,c,c->nc_", units={"c": node.attributes.get_int("num_groups", 1)})


@group_normalization.gradient
def _(g: GradientBuilder, dy: str, x: str, scale: str, bias: str) -> Sequence[str | None]:
    """dX of the module's formula over the channels of a group; dScale = sum(dY x^), dB = sum(dY), a channel."""
    groups = g.attribute("num_groups")
    shape = g.shape_of(x)
    if opset_of(g.node) < 21:
        dx, dscale, dbias = _in_groups(g, g.reshape(dy, [0, groups, -1]), g.reshape(x, [0, groups, -1]), scale)
        return g.Reshape(dx, shape), dscale, dbias
    channels = list(range(1, g.rank(x) - 1))
    grouped = g.reshape(x, [0, groups, -1])
    centered, inverse = _centered(g, grouped, [2])
    normal = g.Mul(centered, inverse)
    w = g.reshape(g.Mul(dy, g.unsqueeze(scale, *channels)), [0, groups, -1])
    dx = g.Reshape(_through(g, w, normal, inverse, [2]), shape)
    others = [0, *range(2, g.rank(x))]
    return dx, g.sum(g.Mul(dy, g.Reshape(normal, shape)), others), g.sum(dy, others)


@group_normalization.local
def _(local: Local) -> None:
    """The node with as many groups as this rank has."""
    local.same(num_groups=local.node.attributes.get_int("num_groups", 1) // local.num_shards("c"))


instance_normalization = op("InstanceNormalization", factors="nc_,c,c->nc_", kernel="normalization")


@instance_normalization.gradient
def _(g: GradientBuilder, dy: str, x: str, scale: str, bias: str) -> Sequence[str | None]:
    """dX of the module's formula over the positions of a channel; dScale = sum(dY x^), dB = sum(dY)."""
    return _in_groups(g, dy, x, scale)


batch_normalization = op(
    "BatchNormalization",
    factors="nc*,c,c,c,c->nc*,c,c",
    remarks="in training, whose statistics are over images and positions, only channels are sharded",
    gradient_outputs=1,
    kernel="normalization",
)


@batch_normalization.sharding
def _(node: ir.Node) -> Rule | None:
    if not node.attributes.get_int("spatial", 1):
        return None
    if node.attributes.get_int("training_mode", 0) or len(node.outputs) > 1:
        return rule(node, ".c_,c,c,c,c->.c_,c,c,c,c")
    return rule(node, "nc*,c,c,c,c->nc*")


@batch_normalization.gradient
def _(g: GradientBuilder, dy: str, x: str, scale: str, bias: str, mean: str, variance: str) -> Sequence[str | None]:
    """In training dX of the module's formula over images and positions; else dX = dY scale / deviation."""
    others = [0, *range(2, g.rank(x))]
    wide = list(range(1, g.rank(x) - 1))
    if g.attribute("training_mode", 0):
        return _batch_in_training(g, dy, x, scale, others, wide)
    inverse = _inverse_root(g, variance, x)
    gain = g.Mul(scale, inverse)
    dx = g.Mul(dy, _wide(g, gain, wide)) if g.wants(0) or g.wants(3) else None
    total = g.sum(dy, others)
    bent = None
    if g.wants(1) or g.wants(4):
        bent = g.sum(g.Mul(dy, g.Sub(x, _wide(g, mean, wide))), others)
    dscale = g.Mul(bent, inverse) if bent and g.wants(1) else None
    dmean = g.Neg(g.Mul(total, gain)) if g.wants(3) else None
    dvariance = None
    if bent and g.wants(4):
        slope = g.Mul(g.Mul(gain, g.Mul(inverse, inverse)), g.constant(-0.5, x))
        dvariance = g.Mul(bent, slope)
    return dx, dscale, total, dmean, dvariance


def _batch_in_training(
    g: GradientBuilder, dy: str, x: str, scale: str, others: list[int], wide: list[int]
) -> Sequence[str | None]:
    """dX = a dY + b (x - mean) + c, with a, b and c one number a channel."""
    centered, inverse = _centered(g, x, others)
    db = g.sum(dy, others, keepdims=True)
    bent = g.Mul(g.sum(g.Mul(dy, centered), others, keepdims=True), inverse)
    dx = None
    if g.wants(0):
        share = g.Reciprocal(g.size_of(x, others, like=x))
        a = g.Mul(_wide(g, scale, wide), inverse)
        b = g.Neg(g.Mul(g.Mul(a, inverse), g.Mul(bent, share)))
        c = g.Neg(g.Mul(a, g.Mul(db, share)))
        dx = g.Add(g.Add(g.Mul(dy, a), g.Mul(centered, b)), c)
    return dx, g.reshape(bent, [-1]), g.reshape(db, [-1])


def _in_groups(g: GradientBuilder, dy: str, x: str, scale: str) -> tuple[str, str, str]:
    """The gradients of one normalization for each image and channel, with one scale a channel."""
    axes = list(range(2, g.rank(x)))
    centered, inverse = _centered(g, x, axes)
    normal = g.Mul(centered, inverse)
    w = g.Mul(dy, _wide(g, scale, list(range(1, g.rank(x) - 1))))
    dx = _through(g, w, normal, inverse, axes)
    return dx, g.sum(g.Mul(dy, normal), [0, *axes]), g.sum(dy, [0, *axes])


def _through(g: GradientBuilder, w: str, normal: str, inverse: str, axes: Sequence[int]) -> str:
    """(w - mean(w) - x^ mean(w x^)) / deviation."""
    along = g.constant(np.array(axes, np.int64))
    mean = g.ReduceMean(w, along, keepdims=1)
    bent = g.ReduceMean(g.Mul(w, normal), along, keepdims=1)
    return g.Mul(g.Sub(w, g.Add(mean, g.Mul(normal, bent))), inverse)


def _centered(g: GradientBuilder, x: str, axes: Sequence[int]) -> tuple[str, str]:
    """x less its mean, and one over its deviation."""
    along = g.constant(np.array(axes, np.int64))
    centered = g.Sub(x, g.ReduceMean(x, along, keepdims=1))
    return centered, _inverse_root(g, g.ReduceMean(g.Mul(centered, centered), along, keepdims=1), x)


def _inverse_root(g: GradientBuilder, square: str, like: str) -> str:
    return g.Reciprocal(g.Sqrt(g.Add(square, g.constant(g.attribute("epsilon", 1e-5), like))))


def _wide(g: GradientBuilder, per_channel: str, axes: Sequence[int]) -> str:
    """One number a channel, aligned with the channels of images."""
    return g.unsqueeze(per_channel, *axes) if axes else per_channel
