"""Metrics that are computed from sums over the records, from which the runtime computes the number for all batches and ranks.

    perplexity              exp of the mean cross entropy                                sums: losses, labels
    precision, recall, f1   of counts by label and predicted class                       counts: classes x classes
    confusion               these counts themselves                              counts: classes x classes
    r2                      1 - sum (t - x)^2 / sum (t - mean t)^2, of all elements      sums: (t - x)^2, t, t^2, elements
    formula                 an expression over scalar outputs of the model               sums: these outputs

Of logits with an axis of classes the predicted class has the largest logit, and precision, recall and f1 are their means over classes that
some label or prediction has. Of one logit for each label the class 1 is predicted where the probability is above `threshold`, and they are
those of that class.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir
from partc.compiler.plan.training.graph_nodes import FLOATS, INTEGERS, GraphNodes, class_axis
from partc.compiler.plan.training.loss import ClassLabels, Name
from partc.compiler.plan.training.losses import Loss
from partc.compiler.plan.training.metric import Metric, OfLogits, OfPrediction
from partc.runtime.artifact.training.metric_formula import BINARY, expression, formula_of
from partc.runtime.options import Refused
from pydantic import Field, model_validator

_FLOAT = ir.DataType.FLOAT
_MOST_CLASSES = 1024


class Perplexity(OfLogits):
    type: Literal["perplexity"] = "perplexity"
    also = ("ppl",)
    mode = "min"
    FORMULA = "perplexity"
    axis: int | None = None
    ignore_index: int | None = None

    @property
    def class_labels(self) -> ClassLabels | None:
        """As `Metric` says."""
        return ClassLabels(self.labels, self.output, self.axis, self.ignore_index)

    def add(self, to: GraphNodes) -> ir.Value:
        """The sum of the cross entropies, and the number of labels that count."""
        output, name = self.names
        x, dims = to.prediction(output)
        axis = class_axis(to, output, dims, self.axis)
        axes = to.constant("class_axis", [axis])
        places = to.op(
            "label_places", "Unsqueeze", to.graph_input(name, dims[:axis] + dims[axis + 1 :], INTEGERS), axes
        )
        safe, counted = _counted(to, places, self.ignore_index)
        shifted = to.op("shifted", "Sub", x, to.op("largest", "ReduceMax", x, axes, keepdims=1))
        total = to.op("total", "ReduceSum", to.op("exponentials", "Exp", shifted), axes, keepdims=1)
        chosen = to.op("at_label", "GatherElements", shifted, safe, axis=axis)
        losses = to.op("losses", "Sub", to.op("log_total", "Log", total), chosen)
        if x.dtype not in (None, _FLOAT):
            losses = to.op("float", "Cast", losses, to=_FLOAT.value)
        return _sums(to, to.op("counted_losses", "Mul", losses, counted), counted)


class _OfCounts(OfLogits):
    """A metric of counts by label and predicted class, or of one class: of true positives, false positives and false negatives."""

    mode = "max"
    COUNTS: ClassVar[tuple[str, ...]] = ("true_positives", "false_positives", "false_negatives")
    """What is counted of one class."""
    axis: int | None = None
    ignore_index: int | None = None
    positive: int | None = Field(None, ge=0, description="The class whose number it is; None: the mean over classes.")
    threshold: float = Field(
        0.5, gt=0, lt=1, description="Probability above which 1 is predicted, where each label has one logit."
    )

    def add(self, to: GraphNodes) -> ir.Value:
        """As `Metric` says."""
        output, name = self.names
        x, dims = to.prediction(output)
        labels = next((value for value in to.graph.inputs if value.name == name), None)
        if labels is not None and labels.shape is not None and len(labels.shape) == len(dims):
            t = to.graph_input(name, dims, (*FLOATS, *INTEGERS))
            bound = float(np.log(self.threshold / (1 - self.threshold)))
            predicted = to.op("predicted", "Greater", x, to.constant("bound", bound, x.dtype or _FLOAT))
            known, counted = _counted(to, to.op("labels", "Cast", t, to=ir.DataType.INT64.value), self.ignore_index)
            return self._of_one(to, to.op("is_one", "Equal", known, to.constant("one", 1)), predicted, counted)
        axis = class_axis(to, output, dims, self.axis)
        labels = to.graph_input(name, dims[:axis] + dims[axis + 1 :], INTEGERS)
        known, counted = _counted(to, to.op("labels", "Cast", labels, to=ir.DataType.INT64.value), self.ignore_index)
        chosen = to.op("predicted", "ArgMax", x, axis=axis, keepdims=0)
        if self.positive is not None:
            positive = to.constant("positive", self.positive)
            is_one, predicted = (
                to.op(f"{word}_is_it", "Equal", one, positive)
                for word, one in (("label", known), ("prediction", chosen))
            )
            return self._of_one(to, is_one, predicted, counted)
        classes = dims[axis]
        if not isinstance(classes, int) or classes > _MOST_CLASSES:
            fact = f"'{output}' has {classes if isinstance(classes, int) else 'an unknown number of'} classes"
            law = f"a count for each label and prediction is kept of at most {_MOST_CLASSES:,} classes"
            raise to.error(fact, law, "give the number of one class by `positive`")
        flat = to.constant("flat", [-1])
        index = to.op("index", "Add", to.op("row", "Mul", known, to.constant("classes", classes)), chosen)
        zeros = to.op(
            "zeros",
            "ConstantOfShape",
            to.constant("cells", [classes * classes]),
            value=ir.tensor(np.zeros(1, np.float32)),
        )
        cells, ones = (
            to.op(f"{word}.flat", "Reshape", one, flat) for word, one in (("index", index), ("counted", counted))
        )
        return to.sums(classes * classes, "ScatterElements", zeros, cells, ones, axis=0, reduction="add")

    def _of_one(self, to: GraphNodes, is_one: ir.Value, predicted: ir.Value, counted: ir.Value) -> ir.Value:
        """The sums of what `COUNTS` names."""
        is_other, not_predicted = to.op("is_other", "Not", is_one), to.op("not_predicted", "Not", predicted)
        pairs = {
            "true_positives": (is_one, predicted),
            "false_positives": (predicted, is_other),
            "false_negatives": (is_one, not_predicted),
            "true_negatives": (is_other, not_predicted),
        }
        found = []
        for word in self.COUNTS:
            number = to.op(f"{word}.each", "Cast", to.op(word, "And", *pairs[word]), to=_FLOAT.value)
            found.append(to.op(f"{word}.counted", "Mul", number, counted))
        return _sums(to, *found)


class Precision(_OfCounts):
    type: Literal["precision"] = "precision"
    FORMULA = "precision"


class Recall(_OfCounts):
    type: Literal["recall"] = "recall"
    also = ("sensitivity",)
    FORMULA = "recall"


class F1(_OfCounts):
    type: Literal["f1"] = "f1"
    also = ("f1_score",)
    FORMULA = "f1"


class Confusion(_OfCounts):
    """How many records there are for each label and prediction; compared, it is the share of labels that are predicted right."""

    type: Literal["confusion"] = "confusion"
    also = ("confusion_matrix",)
    FORMULA = "confusion"
    COUNTS = BINARY


class R2(OfPrediction):
    type: Literal["r2"] = "r2"
    also = ("r2_score",)
    mode = "max"
    FORMULA = "r2"

    def add(self, to: GraphNodes) -> ir.Value:
        """Sums of (t - x)^2, t and t^2, and the number of elements."""
        x, dims = to.prediction(self.names[0])
        t = to.graph_input(self.names[1], dims, [x.dtype or _FLOAT, *FLOATS])
        off = to.op("off", "Sub", x, t)
        ones = to.op("ones", "Cast", to.op("there", "Equal", t, t), to=_FLOAT.value)
        each = [to.op("squares", "Mul", off, off), t, to.op("target_squares", "Mul", t, t)]
        if x.dtype not in (None, _FLOAT):
            each = [to.op(f"float.{k}", "Cast", one, to=_FLOAT.value) for k, one in enumerate(each)]
        return _sums(to, *each, ones)


class FormulaMetric(Metric):
    """An expression over scalar outputs of the model, each a sum over the records of the batch."""

    type: Literal["formula"]
    of: tuple[Name, ...] = Field(
        min_length=1, description="Scalar outputs of the model that are sums over the records.", strict=False
    )
    expression: str = Field(min_length=1, description="The metric, of their names: hits / count.")

    @model_validator(mode="after")
    def _computed(self) -> Self:
        try:
            expression(self.expression, self.of)
        except ValueError as error:
            raise Refused(
                str(error), "it has the names in `of`, numbers, + - * / **, sqrt, exp and log", key="expression"
            ) from None
        return self

    @property
    def formula(self) -> str:
        """As `Metric` says."""
        return formula_of(self.expression, self.of)

    def filled(self, to: GraphNodes, loss: Loss) -> Self:
        """As `Metric` says: it is compared with nothing."""
        return self

    def add(self, to: GraphNodes) -> ir.Value:
        """As `Metric` says."""
        one, sums = to.constant("one", [1]), []
        for k, name in enumerate(self.of):
            value = to.own_scalar(name)
            number = value if value.dtype == _FLOAT else to.op(f"float.{k}", "Cast", value, to=_FLOAT.value)
            sums.append(to.op(f"sum.{k}", "Reshape", number, one))
        return to.sums(len(sums), "Concat", *sums, axis=0)


def _counted(to: GraphNodes, labels: ir.Value, ignored: int | None) -> tuple[ir.Value, ir.Value]:
    """The labels, 0 where they do not count, and 1 or 0 in float32 for each that does or does not."""
    if ignored is None:
        return labels, to.op("counted", "Cast", to.op("there", "Equal", labels, labels), to=_FLOAT.value)
    is_ignored = to.op(
        "ignored", "Equal", labels, to.constant("ignore_index", ignored, labels.dtype or ir.DataType.INT64)
    )
    safe = to.op(
        "safe_labels", "Where", is_ignored, to.constant("no_label", 0, labels.dtype or ir.DataType.INT64), labels
    )
    return safe, to.op("counted", "Cast", to.op("counts", "Not", is_ignored), to=_FLOAT.value)


def _sums(to: GraphNodes, *each: ir.Value) -> ir.Value:
    """The sums of tensors, as the output of the metric."""
    one = to.constant("sum_shape", [1])
    sums = [
        to.op(f"sum.{k}", "Reshape", to.op(f"total.{k}", "ReduceSum", value, keepdims=0), one)
        for k, value in enumerate(each)
    ]
    return to.sums(len(sums), "Concat", *sums, axis=0)
