"""Which inputs hold labels that are numbers of classes, so that one that is none can be refused: a -1 would count from the end.

The labels of an auc are 0 and 1, also where they are floats.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.runtime.artifact.format import LabelRecord

_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def labels_of(program: Program) -> dict[str, LabelRecord]:
    """Maps each label input to its number of classes (0 if only a run tells) and its ignored labels."""
    train = program.plan.train
    if train is None:
        return {}
    graph = program.model.graph
    values = {value.name: value for value in (*graph.inputs, *(out for node in graph for out in node.outputs))}
    inputs = {value.name for value in graph.inputs}
    found: dict[str, LabelRecord] = {}

    def add(labels: str, scores: ir.Value | None, axis: int | None, ignored: int | None) -> None:
        found[labels] = _joined(found.get(labels, LabelRecord(classes=0)), _classes(scores, axis), ignored)

    loss = train.loss
    if loss.type == "softmax_cross_entropy" and not loss.probabilities:
        add(loss.labels, values.get(loss.output), loss.axis, loss.ignore_index)
    for node in graph:
        if node.domain in ("", "ai.onnx") and node.op_type in _LOSSES:
            scores, labels = node.inputs[:2]
            if labels is not None and labels.is_graph_input():
                add(str(labels.name), scores, 1, node.attributes.get_int("ignore_index", None))
    for metric in train.metrics.values():
        if metric.type in ("accuracy", "top_k") and not metric.probabilities and metric.labels not in (None, *found):
            add(str(metric.labels), values.get(metric.output), metric.axis, metric.ignore_index)
    for name, metric in train.metrics.items():
        if metric.type == "auc":
            found[metric.labels or loss.labels] = LabelRecord(classes=2, metric=name)
    return {name: one for name, one in found.items() if name in inputs}


def _classes(scores: ir.Value | None, axis: int | None) -> int | None:
    """The number of classes of logits: along `axis`, else the last dim, of images the channels; None if only a run tells."""
    dims = scores.shape.dims if scores is not None and scores.shape is not None else ()
    size = dims[axis if axis is not None else 1 if len(dims) > 3 else -1] if dims else 0
    return size if isinstance(size, int) else None


def _joined(known: LabelRecord, classes: int | None, ignored: int | None) -> LabelRecord:
    """Joins the label records of two readers of one input."""
    more = [] if ignored is None or ignored in known.ignored else [ignored]
    return LabelRecord(classes=0 if classes is None else max(known.classes, classes), ignored=[*known.ignored, *more])
