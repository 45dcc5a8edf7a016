"""Metrics: how well a model does, as nodes of the whole graph that no gradient flows through, each a float32 scalar, or sums.

    accuracy    the share of labels whose class has the largest logit
    top_k       the share of labels whose class is among the k largest
    mse, mae    the mean of the squares, of the absolute values, of what a prediction is off
    auc         the area under the ROC curve of labels 0 and 1: counts by bin, of which the runtime makes the number
    output      a scalar that the model makes itself

A label is among the k largest where all but k - 1 others have a smaller logit: of equal ones none is preferred, so a model that
says the same of all classes knows none. Unlike ArgMax and TopK this is a count, so classes may be cut as well.

Each but auc is the mean over the whole batch, or over the labels that are not ignored. Of several batches it is that of all their records,
for each batch says what it divides by. Counts of several batches are added, and auc is of all their records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import onnx_ir as ir
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.training.loss import Loss
from partc.compiler.plan.training.metric import TYPES, Metric
from partc.compiler.plan.training.usual_names import k_of, known_type, usual_names
from partc.compiler.training.binned import add_counts, of_classes
from partc.compiler.training.graph_appender import FLOATS, INTEGERS, GraphAppender
from partc.compiler.training.losses import class_axis, distance, own_scalar


def add_metric(
    model: ir.Model,
    name: str,
    metric: Metric,
    where: str = "train.metrics",
    of: Loss | str | None = None,
    known: Known = MappingProxyType({}),
) -> ir.Value:
    """The scalar that the metric is, or its sums, in float32: an output `name` appended to the graph, or the model's own output.

    What the metric does not say is as in the loss `of`; `known` is what is promised of the inputs' dims. Raises CompileError where the
    model has not what the metric speaks of.
    """
    to, metric = GraphAppender(model, name, where, known), meant(model, metric, where)
    if metric.type == "auc" and isinstance(of, Loss):
        metric = _as_in(to, metric, of)
    if isinstance(of, Loss) and of.type != "output":
        metric = _filled(metric, of)
    if metric.type == "output":
        return own_scalar(to, metric.output or name)
    missing = [word for word, one in (("output", metric.output), ("labels", metric.labels)) if one is None]
    if missing:
        keys = [
            key for key in TYPES[metric.type] if {"prediction": "output", "logits": "output"}.get(key, key) in missing
        ]
        keys += ["target"] if "labels" in missing and "target" in TYPES[metric.type] else []
        keys = [key for key in keys if key != "prediction" or "logits" not in keys]
        raise to.error(
            f"the metric '{name}' lacks {' and '.join(dict.fromkeys(keys))}",
            "the loss does not say them",
            "say them here",
        )
    assert metric.output is not None
    assert metric.labels is not None
    if metric.type in ("mse", "mae"):
        return distance(to, metric.output, metric.labels, "l1" if metric.type == "mae" else "mean_squared", "mean")
    if metric.type == "auc":
        return add_counts(to, metric, metric.output, metric.labels)
    return _hits(to, metric, metric.output, metric.labels)


def _as_in(to: GraphAppender, metric: Metric, of: Loss) -> Metric:
    """An auc of what a loss is of: of logits where that is, else of probabilities."""
    if of.type == "softmax_cross_entropy" and metric.output in (None, of.output):
        raise of_classes(to, of.output)
    return metric if metric.output is not None else replace(metric, of_logits=of.type == "binary_cross_entropy")


def meant(model: ir.Model, metric: Metric, where: str) -> Metric:
    """The metric; a word that is no output of the model is the usual name of a type. CompileError where it is none."""
    outputs = [value.name or "" for value in model.graph.outputs]
    if metric.type != "output" or metric.output in outputs:
        return metric
    if known_type(metric.output, TYPES) not in TYPES:
        raise CompileError(Problem(where, *_unknown(metric.output or "", outputs)))
    return Metric(str(known_type(metric.output, TYPES)), k=k_of(metric.output) or Metric.k)


def _unknown(name: str, outputs: Sequence[str]) -> tuple[str, str, str]:
    types = [one for one in TYPES if one != "output"]
    close = nearest(name, [*outputs, *types, *usual_names(TYPES)])
    law = f"the metrics are {', '.join(types)}; the model's outputs are {', '.join(map(repr, outputs))}"
    return (
        f"'{name}' is no metric and no output of the model",
        law,
        f"say '{known_type(close[0], TYPES)}'"
        if close
        else "name one of them, or compute it in the model as an output of one float",
    )


def _filled(metric: Metric, of: Loss) -> Metric:
    """The metric, with what it does not say as in a loss."""
    keys = ("output", "labels", "axis", "ignore_index", "probabilities")
    return replace(metric, **{key: getattr(of, key) for key in keys if getattr(metric, key) is None})


def _hits(to: GraphAppender, metric: Metric, output: str, labels_name: str) -> ir.Value:
    x, dims = to.prediction(output)
    axis, real = class_axis(to, output, dims, metric.axis), ir.DataType.FLOAT
    axes = to.constant("class_axis", [axis])
    if metric.probabilities:
        shares = to.given(labels_name, dims, [x.dtype or real, *FLOATS])
        places = to.op("label_places", "ArgMax", shares, axis=axis)
    else:
        labels = to.given(labels_name, dims[:axis] + dims[axis + 1 :], INTEGERS)
        places = to.op("label_places", "Unsqueeze", labels, axes)
    counted = None
    if metric.ignore_index is not None:
        ignored = to.op("ignored", "Equal", places, to.constant("ignore_index", metric.ignore_index))
        places = to.op("safe_places", "Where", ignored, to.constant("no_label", 0), places)
        counted = to.op("counted", "Not", ignored)
    chosen = to.op("at_label", "GatherElements", x, places, axis=axis)
    others = to.op("not_smaller", "Not", to.op("smaller", "Less", x, chosen))
    count = to.op("rank", "ReduceSum", to.op("ones", "Cast", others, to=real.value), axes, keepdims=1)
    hits = to.op("hits", "LessOrEqual", count, to.constant("k", metric.k if metric.type == "top_k" else 1, real))
    if counted is None:
        each = to.op("each", "Cast", hits, to=real.value)
        mean = to.scalar("ReduceMean", each, dtype=real, keepdims=0)
        return to.counted(mean, each, dims[:axis] + dims[axis + 1 :])
    each = to.op("each", "Cast", to.op("counted_hits", "And", hits, counted), to=real.value)
    weights = to.op("weights", "Cast", counted, to=real.value)
    sums = [to.op(word, "ReduceSum", one, keepdims=0) for word, one in (("sum", each), ("weight_sum", weights))]
    return to.divided(to.scalar("Div", *sums, dtype=real), sums[1])
