"""The loss softmax_cross_entropy: -sum_c q_c log softmax(x)_c; q is 1 at the label, or probabilities; with smoothing and class weights.

The logarithm of the softmax is (x - s) - log sum exp(x - s) with s = ceil(max x): any s close to the maximum will do, and no gradient flows
through Ceil. Unlike LogSoftmax this consists of reductions, so classes may be sharded as well (a vocabulary over ranks): each rank has its
own terms, and three numbers per position are reduced. A mean with weights or ignored labels is a quotient of two sums, and each rank has
terms of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import onnx_ir as ir
from partc.compiler.plan.training.graph_nodes import FLOATS, INTEGERS, Dims, GraphNodes, class_axis, float_type
from partc.compiler.plan.training.loss import ClassLabels, OfLogits, Weights, mean_by_shares, ones_like
from partc.runtime.options import Refused
from pydantic import Field, model_validator


class SoftmaxCrossEntropy(OfLogits):
    """`axis`: that of the classes; None: the last of up to three dims, else 1. `weights`: one number a class. `probabilities`: labels are
    shares of all classes. Positions with the label `ignore_index` do not count: neither in the sum nor in what a mean divides by.
    """

    type: Literal["softmax_cross_entropy"]
    also = ("cross_entropy", "sparse_softmax_cross_entropy", "softmax_cross_entropy_with_logits")
    axis: int | None = None
    ignore_index: int | None = None
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    weights: Weights | None = None
    probabilities: bool = False

    @model_validator(mode="after")
    def _ignores_numbers(self) -> Self:
        if self.probabilities and self.ignore_index is not None:
            raise Refused(
                "`ignore_index` and `probabilities` are both given",
                "only a label that is a number can be ignored",
                "take one of them out; probabilities that are all zero add nothing to the sum",
            )
        return self

    @property
    def class_labels(self) -> ClassLabels | None:
        """Labels as numbers of classes; None if they are probabilities."""
        return None if self.probabilities else ClassLabels(self.labels, self.output, self.axis, self.ignore_index)

    def add(self, to: GraphNodes, shards: int) -> ir.Value:
        """Adds the loss, as `ComparedLoss.add` does."""
        x, dims = to.prediction(self.output)
        axis = class_axis(to, self.output, dims, self.axis)
        classes, dtype = dims[axis], float_type(x)
        positions = dims[:axis] + dims[axis + 1 :]
        if self.weights is not None and classes != len(self.weights):
            size = classes if isinstance(classes, int) else classes.value
            raise to.error(
                f"`weights` has {len(self.weights)} numbers, and '{self.output}' has {size} classes on axis {axis}",
                "there is one weight for each class",
            )
        if self.label_smoothing and self.weights is None and self.probabilities and not isinstance(classes, int):
            raise to.error(f"the number of classes on axis {axis} is not known", "smoothing divides by it")
        axes = to.constant("class_axis", [axis])
        shift = to.op("shift", "Ceil", to.op("largest", "ReduceMax", x, axes, keepdims=1))
        shifted = to.op("shifted", "Sub", x, shift)
        total = to.op("total", "ReduceSum", to.op("exponentials", "Exp", shifted), axes, keepdims=1)
        parts = _Parts(to, self, axis, axes, shifted, to.op("log_total", "Log", total), dtype)
        if self.probabilities:
            shares = to.graph_input(self.labels, dims, [dtype, *FLOATS])
            losses = parts.against(shares, classes, len(dims))
            if not shards and self.reduction != "sum":
                ones = to.op("positions", "ReduceMax", ones_like(to, shares, dtype), axes, keepdims=1)
                return mean_by_shares(to, losses, ones, dtype)
            return _reduced(to, self, losses, None, positions, dtype, shards)
        labels = to.graph_input(self.labels, positions, INTEGERS)
        counted = None
        if self.ignore_index is not None:
            ignored = to.op("ignored", "Equal", labels, to.constant("ignore_index", self.ignore_index))
            labels = to.op("safe_labels", "Where", ignored, to.constant("no_label", 0), labels)
            counted = to.op("counted", "Not", to.op("ignored_there", "Unsqueeze", ignored, axes))
        losses, weights = parts.at(labels, counted, len(dims))
        if not shards and self.reduction != "sum":
            weights = weights or ones_like(to, to.op("positions", "Unsqueeze", labels, axes), dtype)
            return mean_by_shares(to, losses, weights, dtype)
        return _reduced(to, self, losses, weights, positions, dtype, shards)


def _reduced(
    to: GraphNodes,
    loss: SoftmaxCrossEntropy,
    losses: ir.Value,
    weights: ir.Value | None,
    positions: Dims,
    dtype: ir.DataType,
    shards: int,
) -> ir.Value:
    """Adds the sum or the mean of losses; with weights, the mean divides by their sum."""
    if loss.reduction == "sum":
        return to.scalar("ReduceSum", losses, dtype=dtype, keepdims=0)
    if weights is None:
        return to.counted(to.scalar("ReduceMean", losses, dtype=dtype, keepdims=0), losses, positions)
    if shards > 1:
        by_piece = to.by_shard(shards, weights, "weight_sum")
        means = to.op("means", "Div", to.by_shard(shards, losses, "sum"), by_piece)
        mean = to.scalar("ReduceMean", means, dtype=dtype, keepdims=0)
        return to.divided(mean, to.op("weight_sums", "ReduceSum", by_piece, keepdims=0))
    total = to.op("weight_sum", "ReduceSum", weights, keepdims=0)
    return to.divided(to.scalar("Div", to.op("sum", "ReduceSum", losses, keepdims=0), total, dtype=dtype), total)


@dataclass(frozen=True)
class _Parts:
    """The values of a cross entropy: log softmax(x) is `shifted` - `log_total`."""

    to: GraphNodes
    loss: SoftmaxCrossEntropy
    axis: int
    axes: ir.Value
    shifted: ir.Value
    log_total: ir.Value
    dtype: ir.DataType

    def at(self, labels: ir.Value, counted: ir.Value | None, rank: int) -> tuple[ir.Value, ir.Value | None]:
        """Adds the loss of each position with its label, and its weight, None if all weights are 1; both have size 1 along the classes."""
        to, smoothing = self.to, self.loss.label_smoothing
        places = to.op("label_places", "Unsqueeze", labels, self.axes)
        chosen = to.op("at_label", "GatherElements", self.shifted, places, axis=self.axis)
        weight = None
        if self.loss.weights is not None:
            weight = to.op(
                "label_weights", "Gather", to.constant("class_weights", self.loss.weights, self.dtype), places
            )
        if smoothing and weight is None:
            mean = to.op("class_mean", "ReduceMean", self.shifted, self.axes, keepdims=1)
            chosen = to.op(
                "smooth", "Add", self._times("hard", chosen, 1 - smoothing), self._times("even", mean, smoothing)
            )
        losses = to.op("losses", "Sub", self.log_total, chosen)
        if weight is not None:
            losses = to.op("weighted", "Mul", losses, weight)
            if smoothing:
                share = self._aligned(
                    "smoothing_weights", smoothing * np.array(self.loss.weights) / len(self.loss.weights or ()), rank
                )
                whole = smoothing * float(np.mean(self.loss.weights or (1.0,)))
                even = self._expected(share, to.constant("smoothing_weight", whole, self.dtype))
                losses = to.op("smooth", "Add", self._times("hard", losses, 1 - smoothing), even)
        if counted is not None:
            none = to.constant("nothing", 0, self.dtype)
            losses = to.op("counted_losses", "Where", counted, losses, none)
            if weight is None:
                weight = to.op("weights", "Cast", counted, to=self.dtype.value)
            else:
                weight = to.op("weights", "Where", counted, weight, none)
        return losses, weight

    def against(self, shares: ir.Value, classes: int | ir.SymbolicDim, rank: int) -> ir.Value:
        """Adds the loss of each position whose label is a probability for every class."""
        to, smoothing = self.to, self.loss.label_smoothing
        if smoothing:
            assert isinstance(classes, int)
            even = to.constant("even", smoothing / classes, self.dtype)
            shares = to.op("smooth_labels", "Add", self._times("hard", shares, 1 - smoothing), even)
        if self.loss.weights is not None:
            shares = to.op("weighted_labels", "Mul", shares, self._aligned("class_weights", self.loss.weights, rank))
        return self._expected(shares, to.op("shares", "ReduceSum", shares, self.axes, keepdims=1))

    def _expected(self, shares: ir.Value, total: ir.Value) -> ir.Value:
        """Adds -sum_c share_c log softmax(x)_c; `total`: the sum of the shares."""
        to = self.to
        part = to.op("share_of_logits", "Mul", self.shifted, shares)
        mean = to.op("expected", "ReduceSum", part, self.axes, keepdims=1)
        return to.op("expected_losses", "Sub", to.op("share_of_total", "Mul", self.log_total, total), mean)

    def _aligned(self, word: str, numbers: Any, rank: int) -> ir.Value:
        """A constant with one number per class, aligned with the axis of classes."""
        shape = [-1 if axis == self.axis else 1 for axis in range(self.axis, rank)]
        return self.to.constant(word, np.asarray(numbers).reshape(shape), self.dtype)

    def _times(self, word: str, x: ir.Value, number: float) -> ir.Value:
        return self.to.op(word, "Mul", x, self.to.constant(f"{word}_share", number, self.dtype))
