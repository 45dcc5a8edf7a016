"""Losses over classes: classes are replicated, positions are sharded.

The sum over positions is contracted, and so is an even mean: one without weights and without ignored labels.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.autodiff.shapes import like, vector
from partc.compiler.ops.node import LETTERS, operand, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

softmax_cross_entropy = op(
    "SoftmaxCrossEntropyLoss",
    factors="n.d,nd,.->nd,n.d",
    contracted="nd",
    linear="each",
    partial=(2,),
    remarks="of means only an even one is contracted; the classes are replicated; linear only in a sum without the second output",
    kernel="reduction",
)


@softmax_cross_entropy.sharding
def _(node: ir.Node) -> Rule | None:
    return _loss(node, (2,) if _reduction(node) != "mean" and len(node.outputs) == 1 else ())


@softmax_cross_entropy.gradient
def _(g: GradientBuilder, dy: str | None, *names: str | None) -> list[str | None]:
    """dScores = (softmax - label) * share of dY, and of d(log softmax) itself, where that is an output."""
    made = len(g.node.outputs)
    dlog, scores, labels, weights = [*names[: made - 1], *[None] * (2 - made), *names[made - 1 :], None][:4]
    assert scores
    assert labels
    logs = g.output(1)
    terms, dweights = [], None
    if dy:
        labelled = _Labels(g, dy, logs, labels, weights)
        if g.wants(0):
            spread = g.Mul(g.Exp(logs), labelled.share)
            terms.append(g.ScatterElements(spread, labelled.places, g.Neg(labelled.share), axis=1, reduction="add"))
        if weights and g.wants(2):
            dweights = labelled.of_weights(weights)
    if dlog and g.wants(0):
        terms.append(g.Sub(dlog, g.Mul(g.Exp(logs), g.sum(dlog, [1], keepdims=True))))
    dscores = None if not terms else str(terms[0] if len(terms) == 1 else g.Add(*terms))
    return [dscores and like(g, dscores, scores), None, dweights][: len(g.node.inputs)]


negative_log_likelihood = op(
    "NegativeLogLikelihoodLoss",
    factors="n.d,nd,.->nd",
    contracted="nd",
    linear="each",
    partial=(0, 2),
    remarks="of means only an even one is contracted; in a mean linear in input 0 alone",
    kernel="reduction",
)


@negative_log_likelihood.sharding
def _(node: ir.Node) -> Rule | None:
    return _loss(node, (0,) if _reduction(node) == "mean" else (0, 2))


@negative_log_likelihood.gradient
def _(g: GradientBuilder, dy: str, scores: str, labels: str, weights: str | None = None) -> list[str | None]:
    """dScores = zeros, and at each label less its share of dY."""
    labelled = _Labels(g, dy, scores, labels, weights)
    dscores = dweights = None
    if g.wants(0):
        made = g.ScatterElements(g.zeros(scores), labelled.places, g.Neg(labelled.share), axis=1)
        dscores = like(g, str(made), scores)
    if weights and g.wants(2):
        dweights = labelled.of_weights(weights)
    return [dscores, None, dweights][: len(g.node.inputs)]


class _Labels:
    """What each position has of the loss: `places`, its label, and `share`, the loss's cotangent that falls on it."""

    def __init__(self, g: GradientBuilder, dy: str, logs: str, labels: str, weights: str | None) -> None:
        self.g, self.logs, self.dy = g, logs, dy
        self.kind, self.total = g.attribute("reduction", "mean"), ""
        ignored = g.attribute("ignore_index")
        self.counted, self.labels = "", labels
        if ignored is not None:
            skipped = g.constant(ignored, labels)
            self.counted = str(g.Not(g.Equal(labels, skipped)))
            self.labels = str(g.Where(self.counted, labels, g.constant(0, labels)))
        self.places = g.unsqueeze(self.labels, 1)
        weight = ""
        if weights:
            weight = str(g.Gather(weights, self.labels))
        if self.counted:
            mask = g.mask(self.counted, logs)
            weight = str(g.Mul(weight, mask)) if weight else mask
        if self.kind == "mean":
            self.total = str(g.ReduceSum(weight, keepdims=0)) if weight else g.size_of(labels, like=logs)
            self.part = str(g.Div(dy, self.total))
        else:
            self.part = dy
        share = str(g.Mul(self.part, weight)) if weight else self.part
        if not weight and self.kind != "none":
            share = str(g.Expand(share, g.shape_of(labels)))
        self.share = g.unsqueeze(share, 1)

    def of_weights(self, weights: str) -> str:
        """The weights' cotangent: at each label the loss of the position, less the mean where that is what is made."""
        g = self.g
        losses = g.Neg(g.Squeeze(g.GatherElements(self.logs, self.places, axis=1), g.constant([1])))
        if self.kind == "mean":
            losses = g.Sub(losses, g.output(0))
        terms = g.Mul(losses, self.part)
        if self.counted:
            terms = g.Mul(terms, g.mask(self.counted, terms))
        made = g.ScatterND(
            g.zeros(weights), g.reshape(vector(g, self.labels), [-1, 1]), g.reshape(terms, [-1]), reduction="add"
        )
        return like(g, str(made), weights)


def _reduction(node: ir.Node) -> str:
    return node.attributes.get_string("reduction", "mean")


def _loss(node: ir.Node, partial: tuple[int, ...]) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None or rank < 2:
        return None
    places = LETTERS[: rank - 1]
    scores = places[0] + WHOLE + places[1:]
    kind = _reduction(node)
    uneven = operand(node, 2) is not None or node.attributes.get_int("ignore_index", None) is not None
    if kind == "mean" and uneven:
        places, scores = WHOLE * len(places), WHOLE * len(scores)
    summed = kind != "none" and places[0] != WHOLE
    return Rule(
        (scores, places, *((WHOLE if operand(node, 2) is not None else None,) if len(node.inputs) > 2 else ())),
        ("" if kind != "none" else places, scores)[: len(node.outputs)],
        reduce=dict.fromkeys(places, "sum") if summed else {},
        linear="each" if partial else "",
        partial=partial,
        local=local_mean if summed and kind == "mean" else None,
    )


def local_mean(local: Local) -> None:
    """The mean of this rank's positions, divided by the number of shards, is its term of the global mean."""
    shards = math.prod(local.num_shards(letter) for letter in local.rule.reduce)
    if shards == 1:
        local.same()
        return
    scores = local.node.inputs[0]
    assert scores is not None
    assert scores.dtype is not None
    mean = f"{local.outputs[0]}.local"
    local.same(outputs=[mean, *local.outputs[1:]])
    local.give("Div", [mean, local.constant("shards", np.array(shards, scores.dtype.numpy()))], local.outputs[0])
