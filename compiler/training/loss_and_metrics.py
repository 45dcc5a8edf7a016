"""The loss and the metrics of a plan as nodes of the single-device model, so that a mean is over the whole batch whatever the cut."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import onnx_ir as ir
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.training.losses import Loss
from partc.compiler.plan.training.metric import Metric
from partc.compiler.plan.training.metrics import METRICS, OutputMetric
from partc.compiler.plan.training.usual_names import known_type, usual_names
from partc.compiler.training.graph_appender import GraphAppender, Inferred


def add_loss(
    model: ir.Model,
    loss: Loss,
    where: str = "train.loss",
    known: Known = MappingProxyType({}),
    shards: int = 1,
    inferred: Inferred | None = None,
) -> ir.Value:
    """The scalar that the loss is, in float32: an output `loss` appended to the graph, or the model's own output.

    `known` is what is promised of the inputs' dims; `shards`: into how many a batch is dealt out whose means are the mean's terms;
    `inferred` is as `GraphAppender` says. Raises CompileError where the model has not what the loss speaks of.
    """
    return loss.add(GraphAppender(model, "loss", where, known, inferred), shards)


def add_metric(
    model: ir.Model,
    name: str,
    metric: Metric,
    where: str = "train.metrics",
    of: Loss | None = None,
    known: Known = MappingProxyType({}),
    inferred: Inferred | None = None,
) -> ir.Value:
    """The scalar that the metric is, or its sums, in float32: an output `name` appended to the graph, or the model's own output.

    What the metric does not say is as in the loss `of`; `known` is what is promised of the inputs' dims, `inferred` as `GraphAppender`
    says. Raises CompileError where the model has not what the metric speaks of.
    """
    to, metric = GraphAppender(model, name, where, known, inferred), meant(model, metric, where)
    if of is not None:
        metric = metric.filled(to, of)
    if missing := metric.missing:
        fact = f"the metric '{name}' lacks {' and '.join(missing)}"
        raise to.error(fact, "the loss does not say them", "say them here")
    return metric.add(to)


def meant(model: ir.Model, metric: Metric, where: str) -> Metric:
    """The metric; a word that names no output of the model is the usual name of a type. CompileError where it does not mean any."""
    outputs = [name_of(value) for value in model.graph.outputs]
    if not isinstance(metric, OutputMetric) or metric.output in outputs:
        return metric
    kind = METRICS.get(str(known_type(metric.output, METRICS)))
    if kind is None:
        raise CompileError(Problem(where, *_unknown(metric.output or "", outputs)))
    return kind.model_validate(kind.name_options(str(metric.output)))


def _unknown(name: str, outputs: Sequence[str]) -> tuple[str, str, str]:
    types = [one for one in METRICS if one != "output"]
    close = nearest(name, [*outputs, *types, *usual_names(METRICS)])
    law = f"the metrics are {', '.join(types)}; the model's outputs are {', '.join(map(repr, outputs))}"
    return (
        f"'{name}' is no metric and no output of the model",
        law,
        f"say '{known_type(close[0], METRICS)}'"
        if close
        else "name one of them, or compute it in the model as an output of one float",
    )
