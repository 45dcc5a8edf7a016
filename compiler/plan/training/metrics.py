"""The metrics of a plan, and their table: how well a model does.

    accuracy    the share of labels whose class has the largest logit
    top_k       the share of labels whose class is among the k largest
    mse, mae    the mean of the squares, of the absolute values, of what a prediction is off
    auc         the area under the ROC curve of labels 0 and 1: counts by bin, of which the runtime makes the number (`auc.py`)
    perplexity, precision, recall, f1, confusion, r2, formula    sums, of which the runtime makes the number (`summed_metrics.py`)
    output      a scalar that the model makes itself

A label is among the k largest where all but k - 1 others have a smaller logit: of equal ones none is preferred, so a model that
says the same of all classes knows none. Unlike ArgMax and TopK this is a count, so classes may be cut as well.

Each of the others is the mean over the whole batch, or over the labels that are not ignored. Of several batches it is that of all their
records, for each batch says what it divides by. Sums of several batches are added, and the number is that of all their records.

metrics: [accuracy, top5]                                   # a name is a type, or an output of the model
metrics: {best: {type: top_k, k: 3}, auc: {logits: y, labels: clicked, bins: 500}}
"""

from __future__ import annotations

import re
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

import onnx_ir as ir
from partc.compiler.plan.training.auc import Auc
from partc.compiler.plan.training.graph_nodes import FLOATS, INTEGERS, GraphNodes, class_axis
from partc.compiler.plan.training.loss import ClassLabels, Name
from partc.compiler.plan.training.losses import LOSSES, Loss, distance
from partc.compiler.plan.training.metric import Metric, OfLogits, OfPrediction
from partc.compiler.plan.training.summed_metrics import (
    F1,
    R2,
    Confusion,
    FormulaMetric,
    Perplexity,
    Precision,
    Recall,
)
from partc.compiler.plan.training.usual_names import by_type, known_type, unknown_type
from partc.runtime.options import Refused, of_type
from pydantic import BeforeValidator, Field, WrapValidator


class _Hits(OfLogits):
    mode = "max"
    axis: int | None = None
    ignore_index: int | None = None
    probabilities: bool | None = None

    @property
    def _places(self) -> int:
        """How far behind the largest logit a label still counts."""
        return 1

    @property
    def class_labels(self) -> ClassLabels | None:
        """As `Metric` says."""
        return None if self.probabilities else ClassLabels(self.labels, self.output, self.axis, self.ignore_index)

    def add(self, to: GraphNodes) -> ir.Value:
        """As `Metric` says."""
        output, labels_name = self.names
        x, dims = to.prediction(output)
        axis, real = class_axis(to, output, dims, self.axis), ir.DataType.FLOAT
        axes = to.constant("class_axis", [axis])
        if self.probabilities:
            shares = to.graph_input(labels_name, dims, [x.dtype or real, *FLOATS])
            places = to.op("label_places", "ArgMax", shares, axis=axis)
        else:
            labels = to.graph_input(labels_name, dims[:axis] + dims[axis + 1 :], INTEGERS)
            places = to.op("label_places", "Unsqueeze", labels, axes)
        counted = None
        if self.ignore_index is not None:
            ignored = to.op("ignored", "Equal", places, to.constant("ignore_index", self.ignore_index))
            places = to.op("safe_places", "Where", ignored, to.constant("no_label", 0), places)
            counted = to.op("counted", "Not", ignored)
        chosen = to.op("at_label", "GatherElements", x, places, axis=axis)
        others = to.op("not_smaller", "Not", to.op("smaller", "Less", x, chosen))
        count = to.op("rank", "ReduceSum", to.op("ones", "Cast", others, to=real.value), axes, keepdims=1)
        hits = to.op("hits", "LessOrEqual", count, to.constant("k", self._places, real))
        if counted is None:
            each = to.op("each", "Cast", hits, to=real.value)
            mean = to.scalar("ReduceMean", each, dtype=real, keepdims=0)
            return to.counted(mean, each, dims[:axis] + dims[axis + 1 :])
        each = to.op("each", "Cast", to.op("counted_hits", "And", hits, counted), to=real.value)
        weights = to.op("weights", "Cast", counted, to=real.value)
        sums = [to.op(word, "ReduceSum", one, keepdims=0) for word, one in (("sum", each), ("weight_sum", weights))]
        return to.divided(to.scalar("Div", *sums, dtype=real), sums[1])


class Accuracy(_Hits):
    type: Literal["accuracy"] = "accuracy"
    also = ("acc", "categorical_accuracy", "sparse_categorical_accuracy")


class TopK(_Hits):
    type: Literal["top_k"] = "top_k"
    also = ("top_k_accuracy",)
    pattern = "^top_?[1-9][0-9]*(_acc|_accuracy)?$"
    k: int = Field(5, ge=1)

    @classmethod
    def name_options(cls, name: str) -> dict[str, object]:
        return {"k": int(re.sub("[^0-9]", "", name))} if re.fullmatch(cls.pattern, name) else {}

    @property
    def _places(self) -> int:
        return self.k


class MeanSquaredError(OfPrediction):
    type: Literal["mse"] = "mse"
    also = ("mean_squared_error", "mean_squared")
    mode = "min"

    def add(self, to: GraphNodes) -> ir.Value:
        """As `Metric` says."""
        return distance(to, *self.names, "ReduceSumSquare", "mean")


class MeanAbsoluteError(OfPrediction):
    type: Literal["mae"] = "mae"
    also = ("mean_absolute_error", "l1_loss", "l1")
    mode = "min"

    def add(self, to: GraphNodes) -> ir.Value:
        """As `Metric` says."""
        return distance(to, *self.names, "ReduceL1", "mean")


class OutputMetric(Metric):
    """A scalar that the model makes itself; None: that of the metric's name."""

    type: Literal["output"] = "output"
    output: Name | None = Field(None, description="The output of the model that is the metric.")

    def filled(self, to: GraphNodes, loss: Loss) -> Self:
        """As `Metric` says: it is compared with nothing."""
        return self

    def add(self, to: GraphNodes) -> ir.Value:
        """As `Metric` says."""
        return to.own_scalar(self.output or to.path)


METRICS: dict[str, type[Metric]] = by_type(
    Accuracy,
    TopK,
    MeanSquaredError,
    MeanAbsoluteError,
    Auc,
    Perplexity,
    Precision,
    Recall,
    F1,
    Confusion,
    R2,
    FormulaMetric,
    OutputMetric,
)
"""Maps each type to its class."""


def _typed(name: str, value: object) -> object:
    """A metric with its type, by default its name; a name alone that names no type is an output of the model."""
    if not isinstance(value, dict | None):
        return value
    said = {"type": name, **(value or {})}
    kind = known_type(said["type"], METRICS)
    if len(said) == 1 and isinstance(kind, str) and said["type"] not in METRICS:
        return {"type": "output", "output": said["type"]}
    if kind not in METRICS:
        raise unknown_type(kind, METRICS, name, LOSSES)
    found = METRICS[str(kind)]
    return {**found.name_options(str(said["type"])), **found.without_nulls(said), "type": kind}


def _named(value: object) -> object:
    """Metrics by name, of a name, or of a list of names."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        if options := next((one for one in value if isinstance(one, dict | list)), None):
            kind = options.get("type", "accuracy") if isinstance(options, dict) else "accuracy"
            remedy = f"metrics with options are a mapping: write {{{kind}: {{...}}}}"
            raise Refused("a list of metrics has names alone", help=remedy)
        value = {str(one): {"type": one} for one in value}
    if not isinstance(value, dict):
        raise Refused("metrics are a list of names, or a mapping from names to options", help="write [accuracy]")
    return {name: _typed(name, one) for name, one in value.items()}


if TYPE_CHECKING:
    MetricsForm: TypeAlias = dict[str, Metric]
else:
    _ANY = reduce(or_, METRICS.values())
    _FORM = Annotated[_ANY, Field(discriminator="type"), WrapValidator(of_type)]
    MetricsForm = Annotated[
        dict[str, _FORM],
        BeforeValidator(_named, json_schema_input_type=str | list[str] | dict[str, _ANY | None] | None),
    ]
