"""Writes out a model's own loss over classes as reductions, in the form of the plan's loss (`plan/training/cross_entropy.py`).

SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss need all classes at once, and divide a mean by the weights of the labels that are not
ignored. Written out, the classes may be sharded (a vocabulary over ranks): three numbers for each position are reduced. A mean with weights
or ignored labels is a sum divided by a sum, and each rank and each microbatch has partial sums of both.

    SoftmaxCrossEntropyLoss(x, t)                  ReduceMean(log sum exp s - s[t]), s = x - ceil(max x)
    NegativeLogLikelihoodLoss(l, t, w)             ReduceSum(-l[t] w[t]) / ReduceSum(w[t])
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.graph import WRITTEN, operands_of
from partc.compiler.rewrite.batch_norm import EXACT

_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
CLASS_LABELS = "partc.class_labels"
"""Marks the node that looks up a label's score, with the labels' name if they are a graph input (else None), and the ignored label."""
IS_LOSS = "partc.class_loss"
"""Marks each node of a loss over classes."""
_CLASSES = 1
"""The axis of the classes."""


def write_out_class_loss(node: ir.Node) -> None:
    """Replaces the node by simpler nodes, if it is such a loss; its outputs keep their names."""
    if node.domain in ("", "ai.onnx") and node.op_type in _LOSSES and node.graph is not None:
        _Parts(node).replace()


class _Parts:
    """The nodes that compute one loss, whose node stays in the graph until `replace`."""

    def __init__(self, node: ir.Node) -> None:
        self.node, self.nodes = node, list[ir.Node]()
        self.reduction = node.attributes.get_string("reduction", "mean")
        self.ignored = node.attributes.get_int("ignore_index", None)
        scores, labels = node.inputs[:2]
        assert scores is not None
        assert labels is not None
        self.scores, self.labels = scores, labels
        self.weights = node.inputs[2] if len(node.inputs) > 2 else None
        known = (value.dtype for value in (scores, self.weights, node.outputs[0]) if value is not None and value.dtype)
        self.dtype = next(known, ir.DataType.FLOAT)

    def replace(self) -> None:
        """Replaces the node of the loss by these nodes."""
        node, graph = self.node, self.node.graph
        assert graph is not None
        axes = self.integers("class_axis", [_CLASSES])
        scores, log_total = self.scores, None
        logs = node.outputs[1] if len(node.outputs) > 1 and node.outputs[1].name else None
        outputs = list[ir.Value]()
        if node.op_type == "SoftmaxCrossEntropyLoss":
            shift = self.op("shift", "Ceil", self.op("largest", "ReduceMax", scores, axes, keepdims=1))
            scores = self.op("shifted", "Sub", scores, shift)
            total = self.op("total", "ReduceSum", self.op("exponentials", "Exp", scores), axes, keepdims=1)
            log_total = self.op("log_total", "Log", total)
            if logs is not None:
                outputs.append(self.op("logs", "Sub", scores, log_total))
        losses, each = self.losses(scores, log_total, axes)
        outputs.insert(0, self.reduced(losses, each, axes))
        replaced = [node.outputs[0], *([] if logs is None else [logs])]
        for new, old in zip(outputs, replaced, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
        producer = outputs[0].producer()
        assert producer is not None
        producer.name = node.name
        producer.meta[WRITTEN] = operands_of(node)
        ir.convenience.replace_nodes_and_values(graph, node, [node], self.nodes, replaced, outputs)

    def losses(self, scores: ir.Value, log_total: ir.Value | None, axes: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Returns each position's weighted loss and its weight (None where all weights are 1), both with a dim of 1 for the classes."""
        labels, counted = self.labels, None
        if self.ignored is not None:
            skipped = self.op("ignored", "Equal", labels, self.label("ignore_index", self.ignored))
            labels = self.op("safe_labels", "Where", skipped, self.label("no_label", 0), labels)
            counted = self.op("counted", "Not", self.op("ignored_there", "Unsqueeze", skipped, axes))
        places = self.op("label_places", "Unsqueeze", labels, axes)
        chosen = self.op("at_label", "GatherElements", scores, places, axis=_CLASSES)
        given = self.labels.name if self.labels.is_graph_input() else None
        self.nodes[-1].meta[CLASS_LABELS] = (given, self.ignored)
        losses = self.op("losses", "Neg", chosen) if log_total is None else self.op("losses", "Sub", log_total, chosen)
        each = None if self.weights is None else self.op("label_weights", "Gather", self.weights, places)
        if each is not None:
            losses = self.op("weighted", "Mul", losses, each)
        if counted is not None:
            nothing = self.integers("nothing", 0, self.dtype)
            losses = self.op("counted_losses", "Where", counted, losses, nothing)
            one = each if each is not None else self.integers("one", 1, self.dtype)
            each = self.op("weights", "Where", counted, one, nothing)
        return losses, each

    def reduced(self, losses: ir.Value, each: ir.Value | None, axes: ir.Value) -> ir.Value:
        """Reduces the losses of all positions as the node's `reduction` says."""
        if self.reduction == "none":
            return self.op("", "Squeeze", losses, axes)
        if self.reduction == "mean" and each is None:
            return self.op("", "ReduceMean", losses, keepdims=0)
        if self.reduction == "sum":
            return self.op("", "ReduceSum", losses, keepdims=0)
        assert each is not None
        total = self.op("weight_sum", "ReduceSum", each, keepdims=0)
        return self.op("", "Div", self.op("sum", "ReduceSum", losses, keepdims=0), total)

    def op(self, word: str, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Adds a node of this loss, and returns its output."""
        name = f"{self.node.name}.classes.{word}"
        out = ir.Value(name=f"{self.node.outputs[0].name}.classes.{word}")
        given = ir.convenience.convert_attributes(attributes)
        self.nodes.append(ir.Node("", op_type, inputs, given, outputs=[out], name=name))
        self.nodes[-1].metadata_props.update(self.node.metadata_props)
        self.nodes[-1].meta.update({EXACT: True, IS_LOSS: True})
        return out

    def integers(self, word: str, numbers: Any, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Adds a constant."""
        tensor = ir.tensor(np.array(numbers, dtype.numpy()), dtype, name=f"{self.node.outputs[0].name}.classes.{word}")
        return self.op(word, "Constant", value=tensor)

    def label(self, word: str, number: int) -> ir.Value:
        """Adds a constant in the type of the labels."""
        if self.labels.dtype is not None:
            return self.integers(word, number, self.labels.dtype)
        return self.op(f"{word}.of_type", "CastLike", self.integers(word, number), self.labels)
