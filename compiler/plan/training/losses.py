"""The losses of a plan, which training minimizes, and their table.

    softmax_cross_entropy    -sum_c q_c log softmax(x)_c    (`cross_entropy.py`)
    mean_squared             (x - t)^2
    l1                       |x - t|
    binary_cross_entropy     softplus(x) - t x, of logits; softplus(x) = log(1 + exp(x))
    output                   a scalar that the model computes itself

loss: {type: softmax_cross_entropy, logits: y, labels: label, label_smoothing: 0.1}
loss: total                                                 # an output of the model
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.plan.training.cross_entropy import SoftmaxCrossEntropy
from partc.compiler.plan.training.graph_nodes import FLOATS, MOST_AT_ONCE, Dims, GraphNodes, float_type
from partc.compiler.plan.training.loss import (
    ClassLabels,
    ComparedLoss,
    Name,
    OfLogits,
    OfPrediction,
    Reduction,
    Weights,
    mean_by_shares,
    ones_like,
)
from partc.compiler.plan.training.usual_names import UsuallyNamed, by_type, known_type, unknown_type
from partc.runtime.options import Remedy, of_type
from pydantic import BeforeValidator, Field, WrapValidator


class MeanSquared(OfPrediction):
    type: Literal["mean_squared"]
    also = ("mse", "mean_squared_error")

    def add(self, to: GraphNodes, shards: int) -> ir.Value:
        """Adds the loss, as `ComparedLoss.add` does."""
        return distance(to, self.output, self.labels, "ReduceSumSquare", self.reduction, shards)


class L1(OfPrediction):
    type: Literal["l1"]
    also = ("mae", "mean_absolute_error", "l1_loss")

    def add(self, to: GraphNodes, shards: int) -> ir.Value:
        """Adds the loss, as `ComparedLoss.add` does."""
        return distance(to, self.output, self.labels, "ReduceL1", self.reduction, shards)


def distance(to: GraphNodes, prediction: str, target: str, norm: str, reduction: str, shards: int = 1) -> ir.Value:
    """Adds the mean or sum of the differences between a prediction and its target: of squares (ReduceSumSquare), or of absolutes
    (ReduceL1).

    `shards`: as in `ComparedLoss.add`.
    """
    x, dims = to.prediction(prediction)
    dtype = float_type(x)
    t = to.graph_input(target, dims, [dtype, *FLOATS])
    off = to.op("difference", "Sub", x, t)
    if reduction == "sum":
        return to.scalar(norm, off, dtype=dtype, keepdims=0)
    # A mean divides by a number that only a run tells; of dims that are known it is a sum, whose gradient is one multiplication.
    # The dim of records is not known: a part of a batch has fewer.
    known = [axis for axis, dim in enumerate(dims) if axis and isinstance(dim, int)]
    if not known or not shards:
        each = to.op("losses", "Abs", off) if norm == "ReduceL1" else to.op("losses", "Mul", off, off)
        if not shards:
            return mean_by_shares(to, each, ones_like(to, t, dtype), dtype)
        return to.counted(to.scalar("ReduceMean", each, dtype=dtype, keepdims=0), off, dims)
    count = float(np.prod([dim for dim in dims[1:] if isinstance(dim, int)]))
    if len(known) > 1 and count > MOST_AT_ONCE:
        rows = to.op("rows", norm, off, to.constant("last_axis", known[-1:]), keepdims=0)
        sums = to.op("sums", "ReduceSum", rows, to.constant("known_axes", known[:-1]), keepdims=0)
    else:
        sums = to.op("sums", norm, off, to.constant("known_axes", known), keepdims=0)
    total = to.op("mean", "ReduceMean", sums, keepdims=0)
    return to.counted(to.scalar("Div", total, to.constant("count", count, dtype), dtype=dtype), off, dims)


class BinaryCrossEntropy(OfLogits):
    """`pos_weight`: what a label of 1 counts, one number or one a column."""

    type: Literal["binary_cross_entropy"]
    also = ("bce_with_logits", "binary_cross_entropy_with_logits")
    pos_weight: Weights | None = None

    def losses(self, to: GraphNodes, x: ir.Value, t: ir.Value, dims: Dims) -> ir.Value:
        """Adds softplus(x) - t x for each element; with a weight p of ones, (1 + (p - 1) t) softplus(x) - p t x.

        softplus(x) is computed as max(x, 0) + log(1 + exp(-|x|)), and -|x| as x - 2 max(x, 0): onnxruntime's own Softplus takes 5 times as
        long as these ops, and so does the gradient of its Abs. The error is that of 1 + exp(-|x|), 6e-8 of an element's loss.
        """
        dtype = float_type(x)
        unit, above = to.constant("one", 1, dtype), to.op("above", "Relu", x)
        under = to.op("minus_size", "Add", x, to.op("twice_below", "Mul", above, to.constant("minus_two", -2, dtype)))
        logs = to.op("logs", "Log", to.op("sums", "Add", to.op("exponentials", "Exp", under), unit))
        if self.pos_weight is None:
            labelled = to.op("labelled", "Mul", x, to.op("minus_labels", "Neg", t))
            losses = to.op("losses", "Sum", above, logs, labelled)
        else:
            p = np.array(self.pos_weight if len(self.pos_weight) > 1 else self.pos_weight[0])
            if p.ndim and (not dims or dims[-1] != p.size):
                last = dims[-1] if dims else "missing"
                raise to.error(f"`pos_weight` has {p.size} numbers", f"the last dim of '{self.output}' is {last}")
            counts = to.op(
                "counts", "Add", to.op("more", "Mul", t, to.constant("pos_weight_less_1", p - 1, dtype)), unit
            )
            soft = to.op("weighted", "Mul", to.op("softplus", "Add", above, logs), counts)
            labelled = to.op(
                "labelled", "Mul", x, to.op("minus_labels", "Mul", t, to.constant("minus_pos_weight", -p, dtype))
            )
            losses = to.op("losses", "Add", soft, labelled)
        return losses


class OutputLoss(UsuallyNamed):
    """A scalar that the model makes itself."""

    type: Literal["output"]
    output: Name = Field(description="The output of the model that is the loss.")
    labels: ClassVar[str] = "labels"
    """What an input of labels is called where a metric needs one."""
    reduction: ClassVar[Reduction] = "mean"
    """How the losses of records are one number, as far as it is known."""
    per_rank_mean: ClassVar[bool] = False
    class_labels: ClassVar[ClassLabels | None] = None
    metric_defaults: ClassVar[Mapping[str, Any]] = {}

    def add(self, to: GraphNodes, shards: int) -> ir.Value:
        """Adds the loss, as `ComparedLoss.add` does."""
        return to.own_scalar(self.output)


Loss: TypeAlias = ComparedLoss | OutputLoss
LOSSES: dict[str, type[UsuallyNamed]] = by_type(
    SoftmaxCrossEntropy,
    MeanSquared,
    L1,
    BinaryCrossEntropy,
    OutputLoss,
)
"""Maps each type to its class."""


def _typed(value: object) -> object:
    """Returns a loss under the name of its type; a text is an output of the model, and a null counts as absent."""
    if isinstance(value, str):
        return {"type": "output", "output": value}
    if not isinstance(value, dict):
        return value
    kind = known_type(value.get("type"), LOSSES)
    if kind not in LOSSES:
        raise unknown_type(kind, LOSSES)
    return {**LOSSES[str(kind)].without_nulls(value), "type": kind}


if TYPE_CHECKING:
    LossForm: TypeAlias = Loss
else:
    _ANY = reduce(or_, LOSSES.values())
    LossForm = Annotated[
        Annotated[_ANY, Field(discriminator="type")],
        WrapValidator(of_type),
        BeforeValidator(_typed, json_schema_input_type=str | _ANY),
        Remedy(
            "write loss: {type: softmax_cross_entropy, logits: logits, labels: label}, or the name of a scalar output"
        ),
    ]
