"""Which inputs hold labels that are numbers of classes, so that any other number can be refused: a -1 would count from the end.

The labels of an auc are 0 and 1, also where they are floats.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Prepared
from partc.compiler.plan.training.loss import ClassLabels
from partc.runtime.artifact.format import LabelRecord

_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def labels_of(program: Prepared) -> dict[str, LabelRecord]:
    """Maps each label input to its number of classes (0 if only a run tells) and its ignored labels."""
    train = program.plan.train
    if train is None:
        return {}
    graph = program.model.graph
    values = {value.name: value for value in (*graph.inputs, *(out for node in graph for out in node.outputs))}
    inputs = {value.name for value in graph.inputs}
    found: dict[str, LabelRecord] = {}

    def add(labels: str, scores: ir.Value | None, axis: int | None, ignored: int | None) -> None:
        known, classes = found.get(labels, LabelRecord(classes=0)), _classes(scores, axis)
        more = [] if ignored is None or ignored in known.ignored else [ignored]
        found[labels] = LabelRecord(
            classes=0 if classes is None else max(known.classes, classes), ignored=[*known.ignored, *more]
        )

    if (own := train.loss.class_labels) is not None:
        add(str(own.labels), values.get(own.output), own.axis, own.ignored)
    for node in graph:
        if node.domain in ("", "ai.onnx") and node.op_type in _LOSSES:
            scores, labels = node.inputs[:2]
            if labels is not None and labels.is_graph_input():
                add(name_of(labels), scores, 1, node.attributes.get_int("ignore_index", None))
    for name, metric in train.metrics.items():
        match metric.class_labels:
            case ClassLabels(of, count=int(count)) if count:
                found[of or train.loss.labels] = LabelRecord(classes=count, metric=name)
            case ClassLabels(str(of), output, axis, ignored) if of not in found:
                add(of, values.get(output), axis, ignored)
    return {name: one for name, one in found.items() if name in inputs}


def _classes(scores: ir.Value | None, axis: int | None) -> int | None:
    """The number of classes of logits: along `axis`, else the last dim, of images the channels; None if only a run tells."""
    dims = scores.shape.dims if scores is not None and scores.shape is not None else ()
    size = dims[axis if axis is not None else 1 if len(dims) > 3 else -1] if dims else 0
    return size if isinstance(size, int) else None
