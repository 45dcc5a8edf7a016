"""A loss of a plan: its keys, and the nodes that it adds to the model, so that a mean is over the global batch for any sharding.

A loss is a class: a subclass of `ComparedLoss` (`losses.py` has the table). Its fields are the keys of the plan and of the schema; `losses`
adds the loss of each element, or `add` the scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import onnx_ir as ir
from partc.compiler.plan.groups import frame_in
from partc.compiler.plan.training.graph_nodes import FLOATS, Dims, GraphNodes, float_type
from partc.compiler.plan.training.usual_names import UsuallyNamed
from partc.runtime.options import Refused, shown
from pydantic import Field, PlainValidator, ValidationInfo

SUM_OVER_RANKS = "sum_over_ranks"
_NUMBERS = "a number, a list of numbers, or the name of an .npy file"


def _weights(value: object, info: ValidationInfo) -> tuple[float, ...]:
    """Returns the numbers of a list, or of a file in the plan's folder."""
    numbers: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        from partc.runtime.data.npy import BROKEN, read_array, reason

        path = frame_in(info).folder / value
        try:
            array = read_array(path)
        except BROKEN as error:
            raise Refused(f"'{path}' is no .npy file: {reason(error)}") from None
        if array.ndim != 1 or array.dtype.kind not in "fiu":
            fact = f"'{path}' has {array.dtype} of shape {list(array.shape)}; expected one list of numbers"
            raise Refused(fact)
        numbers = array.tolist()
    if not numbers or any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        raise Refused(f"expected {_NUMBERS}, but got {shown(value)}")
    if wrong := [number for number in numbers if not 0 <= number < float("inf")]:
        raise Refused(f"{wrong[0]} is not a weight; a weight is 0 or more, and finite")
    return tuple(float(number) for number in numbers)


Name: TypeAlias = Annotated[str, Field(min_length=1)]
Weights: TypeAlias = Annotated[
    tuple[float, ...],
    PlainValidator(_weights, json_schema_input_type=float | str | Annotated[list[float], Field(min_length=1)]),
]
Reduction: TypeAlias = Literal["mean", "sum", "sum_over_ranks"]
LOGITS, LABELS = "The output of the model with the logits.", "The input with the labels."
PREDICTION, TARGET = "The output of the model with the prediction.", "The input with the target."


@dataclass(frozen=True)
class ClassLabels:
    """Labels that are numbers of classes: the input, and the number of classes, which is `count` or the size of an output's axis.

    A label equal to `ignored` counts nowhere.
    """

    labels: str | None
    output: str | None = None
    axis: int | None = None
    ignored: int | None = None
    count: int = 0


class ComparedLoss(UsuallyNamed):
    """A loss of an `output` of the model against the input `labels`, which is added where the model has none.

    Its reduction may be the sum over ranks of their means: what makes that a sum is a factor of the cotangents.
    """

    reduction: Reduction = "mean"
    output: Name
    labels: Name

    @property
    def per_rank_mean(self) -> bool:
        """Whether gradients are those of the sum over ranks of each rank's mean, not of the mean over the whole batch."""
        return self.reduction == SUM_OVER_RANKS

    @property
    def class_labels(self) -> ClassLabels | None:
        """The labels that are numbers of classes; None if the loss has none."""
        return None

    @property
    def metric_defaults(self) -> Mapping[str, Any]:
        """The values that a metric takes from the loss if it does not set them itself."""
        keys = ("output", "labels", "axis", "ignore_index", "probabilities")
        return {key: getattr(self, key) for key in keys if key in type(self).model_fields}

    def losses(self, to: GraphNodes, x: ir.Value, t: ir.Value, dims: Dims) -> ir.Value:
        """Adds the loss of each element of a prediction x with its target t, both of the dims `dims`, and returns it."""
        raise NotImplementedError

    def add(self, to: GraphNodes, shards: int) -> ir.Value:
        """Adds the loss, one float32 number, and returns it.

        `shards`: the number of shards into which a batch is dealt, whose means are the terms of the mean; 0: the batch is computed in
        parts, and each has its own terms of the mean (`mean_by_shares`).
        """
        x, dims = to.prediction(self.output)
        dtype = float_type(x)
        labels = to.graph_input(self.labels, dims, [dtype, *FLOATS])
        losses = self.losses(to, x, labels, dims)
        if self.reduction == "sum":
            return to.scalar("ReduceSum", losses, dtype=dtype, keepdims=0)
        if not shards:
            return mean_by_shares(to, losses, ones_like(to, labels, dtype), dtype)
        return to.counted(to.scalar("ReduceMean", losses, dtype=dtype, keepdims=0), losses, dims)


def mean_by_shares(to: GraphNodes, losses: ir.Value, weights: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Adds a weighted mean as a sum of each loss's share of it: any part of the batch has its own terms, independent of the other parts."""
    total = to.op("weight_sum", "ReduceSum", weights, keepdims=0)
    return to.divided(to.scalar("ReduceSum", to.op("terms", "Div", losses, total), dtype=dtype, keepdims=0), total)


def ones_like(to: GraphNodes, labels: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Adds a one for each label."""
    return to.op("weights", "Cast", to.op("labelled", "Equal", labels, labels), to=dtype.value)


class OfLogits(ComparedLoss):
    """A loss of logits."""

    output: Name = Field(alias="logits", description=LOGITS)
    labels: Name = Field(description=LABELS)


class OfPrediction(ComparedLoss):
    """A loss of what a prediction is off its target."""

    output: Name = Field(alias="prediction", description=PREDICTION)
    labels: Name = Field(alias="target", description=TARGET)
