"""Losses over classes: each position has its own; their sum is contracted, and so is an even mean: one without weights and
without ignored labels."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from partc.compiler.ops.local import Local
from partc.compiler.ops.operands import LETTERS, operand, rank_of
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.ops.table import op


@op("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(node: ir.Node) -> Rule | None:
    """`n.d,nd,.->nd,n.d`; nd contracted by sum, and by an even mean; the classes whole; a sum passes in the weights."""
    return _loss(node, (2,) if _reduction(node) != "mean" and len(node.outputs) == 1 else ())


@op("NegativeLogLikelihoodLoss")
def negative_log_likelihood(node: ir.Node) -> Rule | None:
    """`n.d,nd,.->nd`; nd contracted by sum, and by an even mean; a sum passes in one operand."""
    return _loss(node, (0,) if _reduction(node) == "mean" else (0, 2))


def _reduction(node: ir.Node) -> str:
    return node.attributes.get_string("reduction", "mean")


def _loss(node: ir.Node, terms: tuple[int, ...]) -> Rule | None:
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
        linear="each" if terms else "",
        terms=terms,
        local=_local_mean if summed and kind == "mean" else None,
    )


def _local_mean(local: Local) -> None:
    """The mean of this rank's positions, divided by the number of pieces, is its term of the whole's."""
    pieces = math.prod(local.cut(letter) for letter in local.rule.reduce)
    if pieces == 1:
        local.same()
        return
    scores = local.node.inputs[0]
    assert scores is not None
    assert scores.dtype is not None
    mean = f"{local.outputs[0]}.local"
    local.same(outputs=[mean, *local.outputs[1:]])
    local.emit("Div", [mean, local.constant("pieces", np.array(pieces, scores.dtype.numpy()))], local.outputs[0])
