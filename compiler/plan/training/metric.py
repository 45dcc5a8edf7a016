"""A metric of a plan: its keys, and the nodes that it appends to the model, through which no gradient flows.

A metric is a class: a subclass of `ComparedMetric`, in the table of `metrics.py`. It gives one float32 number, the mean over the
whole batch, or sums (`formula`) of which the runtime makes the number, so that it is that of all records of several batches.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import onnx_ir as ir
from partc.compiler.plan.training.graph_nodes import GraphNodes
from partc.compiler.plan.training.loss import LABELS, LOGITS, PREDICTION, TARGET, ClassLabels, Name
from partc.compiler.plan.training.losses import Loss
from partc.compiler.plan.training.usual_names import UsuallyNamed
from pydantic import Field


class Metric(UsuallyNamed):
    """A metric: what is None is as in the loss."""

    mode: ClassVar[Literal["min", "max"] | None] = None
    """Whether less or more of it is better; None where that cannot be known."""
    FORMULA: ClassVar[str] = ""

    @property
    def formula(self) -> str:
        """The expression that computes the metric from the sums in its output; empty where the output is the metric."""
        return self.FORMULA

    @property
    def class_labels(self) -> ClassLabels | None:
        """The labels that the metric reads as class numbers; None where it reads none."""
        return None

    @property
    def missing(self) -> list[str]:
        """Returns the required keys that neither the plan nor the loss sets."""
        return []

    def filled(self, to: GraphNodes, loss: Loss) -> Self:
        """Returns the metric with its unset keys taken from the loss."""
        said = loss.metric_defaults
        keys = [key for key in type(self).model_fields if key in said and getattr(self, key) is None]
        return self.model_copy(update={key: said[key] for key in keys})

    def add(self, to: GraphNodes) -> ir.Value:
        """Appends the output `<path>`: one float32 number, or the sums."""
        raise NotImplementedError


class ComparedMetric(Metric):
    """A metric of an `output` of the model against the input `labels`."""

    output: Name | None = None
    labels: Name | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the output and of the labels' input, both of which must be set."""
        assert self.output is not None
        assert self.labels is not None
        return self.output, self.labels

    @property
    def missing(self) -> list[str]:
        """As `Metric` says."""
        fields = type(self).model_fields
        return [fields[key].alias or key for key in ("output", "labels") if not getattr(self, key)]


class OfLogits(ComparedMetric):
    """A metric of logits."""

    output: Name | None = Field(None, alias="logits", description=LOGITS)
    labels: Name | None = Field(None, description=LABELS)


class OfPrediction(ComparedMetric):
    """A metric of what a prediction is off its target."""

    output: Name | None = Field(None, alias="prediction", description=PREDICTION)
    labels: Name | None = Field(None, alias="target", description=TARGET)
