"""The metrics of a plan, and their table: how well a model does.

    accuracy    the share of labels whose class has the largest logit
    top_k       the share of labels whose class is among the k largest
    mse, mae    the mean of the squares, or of the absolute values, of the prediction's error
    auc         the area under the ROC curve of labels 0 and 1: counts by bin, from which the runtime computes the number
    perplexity, precision, recall, f1, confusion, r2, formula    sums, from which the runtime computes it
    output      a scalar that the model itself computes

A label is among the k largest where all but k - 1 others have a smaller logit: ties do not count as hits, so a model with equal logits for
all classes has none. Unlike ArgMax and TopK this is a count, so the class axis may be sharded as well.

Each of the others is the mean over the whole batch, or over the labels that are not ignored. Of several batches it is that of all their
records, for each batch says what it divides by. Sums of several batches are added, and the number is that of all their records.

metrics: [accuracy, top5]                                   # a name is a type, or an output of the model metrics: {best: {type: top_k, k:
3}, auc: {logits: y, labels: clicked, bins: 500}}

The metric auc, the area under the ROC curve, as counts: how many labels 0, and how many 1, have their prediction in each bin.

The place of a logit x is u = x / (2 + |x|), and bins cut -1 < u < 1 into equal parts: they are 4/bins wide at logit 0, and a constant share
of a large logit. So they stay narrow where probabilities are small, as those of rare clicks: where 1 of 1,000 labels is 1, 1,000 equal
parts of the probability are off by 0.02, and these by 0.0005. Of a probability the logit is taken. A prediction without a place (NaN, or no
probability) is counted in one more bin, so that it is told.

Counts are made by ScatterElements, in 30 us for a batch of 4,096. In onnxruntime it adds in one thread, whereas ScatterND may lose terms in
several. OneHot with MatMul takes 11 ms for 1,000 bins, comparisons with all bounds 4 ms, two digits as products of two one-hots 0.6 ms.

Metrics that are computed from sums over the records, from which the runtime computes the number for all batches and ranks.

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

import re
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError
from partc.compiler.plan.training.graph_nodes import FLOATS, INTEGERS, GraphNodes, class_axis
from partc.compiler.plan.training.loss import LABELS, LOGITS, ClassLabels, Name
from partc.compiler.plan.training.losses import LOSSES, Loss, distance
from partc.compiler.plan.training.metric import Metric, OfLogits, OfPrediction
from partc.compiler.plan.training.usual_names import by_type, known_type, unknown_type
from partc.runtime.artifact.training.metric_formula import BINARY, ROC_AUC, expression, formula_of
from partc.runtime.options import Refused, of_type
from pydantic import BeforeValidator, Field, WrapValidator, model_validator

_FLOAT, _INT = ir.DataType.FLOAT, ir.DataType.INT64
_HALF = 2.0
"""The logit whose place is halfway to the end."""
_LARGEST = 1e6
"""Logits above it have its place."""


class Auc(Metric):
    """The area under the ROC curve, of logits or of probabilities; `bins`: into how many its predictions are counted."""

    type: Literal["auc"] = "auc"
    FORMULA = ROC_AUC
    mode = "max"
    also = ("roc_auc", "auroc", "binary_auroc", "roc_auc_score")
    logits: Name | None = Field(None, description=LOGITS)
    prediction: Name | None = Field(None, description="The output of the model with the probabilities.")
    labels: Name | None = Field(None, description=LABELS)
    bins: int = Field(2000, ge=2, le=65536)

    @model_validator(mode="after")
    def _of_one_output(self) -> Self:
        if self.logits is not None and self.prediction is not None:
            law = "logits are any numbers, a prediction of auc is a probability from 0 to 1"
            raise Refused("`logits` and `prediction` are both given", law, "take one of them out")
        return self

    @property
    def output(self) -> str | None:
        """The output of the model with the predictions."""
        return self.logits or self.prediction

    @property
    def class_labels(self) -> ClassLabels | None:
        """As `Metric` says: they are 0 and 1."""
        return ClassLabels(self.labels, count=2)

    @property
    def missing(self) -> list[str]:
        """As `Metric` says."""
        return [key for key, name in (("logits", self.output), ("labels", self.labels)) if not name]

    def filled(self, to: GraphNodes, loss: Loss) -> Self:
        """As `Metric` says: an auc is of logits where the loss is, else of probabilities."""
        said = loss.metric_defaults
        if not said:
            return self
        if "axis" in said and self.output in (None, loss.output):
            raise _of_classes(to, loss.output)
        more = {} if self.labels is not None else {"labels": loss.labels}
        if self.output is None:
            key = "logits" if type(loss).model_fields["output"].alias == "logits" else "prediction"
            more[key] = loss.output
        return self.model_copy(update=more)

    def add(self, to: GraphNodes) -> ir.Value:
        """2 (bins + 1) counts in float32; CompileError where predictions are not one for each label."""
        output, labels = self.output, self.labels
        assert output is not None
        assert labels is not None
        x, dims = to.prediction(output)
        given = next((value for value in to.graph.inputs if value.name == labels), None)
        if given is not None and given.shape is not None and len(given.shape) == len(dims) - 1 and dims[-1] != 1:
            raise _of_classes(to, output)
        t = to.graph_input(labels, dims, (_INT, *INTEGERS, *FLOATS))
        flat = to.constant("flat", [-1])
        if x.dtype not in (None, _FLOAT):
            x = to.op("float", "Cast", x, to=_FLOAT.value)
        x, t = to.op("predictions", "Reshape", x, flat), to.op("labels", "Reshape", t, flat)
        known, logits = _logits(to, x, self.logits is not None)
        bins, rows = self.bins, 2 * (self.bins + 1)
        size = to.op("size", "Add", to.op("distance", "Abs", logits), to.constant("half", _HALF, _FLOAT))
        place = to.op("place", "Div", logits, size)
        above = to.op("above", "Add", place, to.constant("one", 1, _FLOAT))
        at = to.op("at", "Cast", to.op("bins", "Mul", above, to.constant("per_unit", bins / 2, _FLOAT)), to=_INT.value)
        at = to.op("bin", "Where", known, at, to.constant("no_bin", bins))
        index = to.op("index", "Add", at, to.op("row", "Mul", t, to.constant("row_size", bins + 1)))
        ones = to.op("ones", "Cast", to.op("there", "GreaterOrEqual", index, to.constant("first", 0)), to=_FLOAT.value)
        zeros = to.op(
            "zeros", "ConstantOfShape", to.constant("rows", [rows]), value=ir.tensor(np.zeros(1, _FLOAT.numpy()))
        )
        return to.sums(rows, "ScatterElements", zeros, index, ones, axis=0, reduction="add")


def _logits(to: GraphNodes, x: ir.Value, are_logits: bool) -> tuple[ir.Value, ir.Value]:
    """Returns which predictions have a bin, and their logits, clamped to the bounds."""
    if are_logits:
        known = to.op("is_number", "Not", to.op("is_nan", "IsNaN", x))
    else:
        least, most = to.constant("least", 0, _FLOAT), to.constant("most", 1, _FLOAT)
        known = to.op(
            "is_probability",
            "And",
            to.op("from_0", "GreaterOrEqual", x, least),
            to.op("to_1", "LessOrEqual", x, most),
        )
        against = to.op("against", "Log", to.op("rest", "Sub", most, x))
        x = to.op("logits", "Sub", to.op("for", "Log", x), against)
    low, high = (to.constant(word, sign * _LARGEST, _FLOAT) for word, sign in (("lowest", -1), ("highest", 1)))
    return known, to.op("bounded", "Clip", x, low, high)


def _of_classes(to: GraphNodes, output: str) -> CompileError:
    """The error of an output that has scores of several classes."""
    return to.error(
        f"the output '{output}' has a score for each of several classes",
        "auc is of one logit, or one probability, for each label, which is 0 or 1",
        "of two classes, make the second logit less the first an output of the model, and name it by `logits`",
    )


class _Hits(OfLogits):
    mode = "max"
    axis: int | None = None
    ignore_index: int | None = None
    probabilities: bool | None = None

    @property
    def _places(self) -> int:
        """The number of places, from the largest logit down, in which a label counts as a hit."""
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
