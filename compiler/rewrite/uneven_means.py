"""A model's own loss over classes whose labels count unevenly, as a sum over a sum.

SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss divide their mean by the weights of the labels that are not ignored. As one node
that is known only where all labels are; written out, each rank and each part of a batch has its term of both sums.

    SoftmaxCrossEntropyLoss(x, t, w) {mean}     Div(SoftmaxCrossEntropyLoss(x, t, w) {sum}, ReduceSum(w[t], 0 where t is ignored))
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def split_uneven_means(model: ir.Model) -> None:
    """Writes out every such node of the main graph; the value that it makes keeps its name."""
    for node in list(model.graph):
        if node.domain in ("", "ai.onnx") and node.op_type in _LOSSES:
            ignored = node.attributes.get_int("ignore_index", None)
            weights = node.inputs[2] if len(node.inputs) > 2 else None
            if node.attributes.get_string("reduction", "mean") == "mean" and (ignored is not None or weights):
                _split(node, ignored, weights)


def _split(node: ir.Node, ignored: int | None, weights: ir.Value | None) -> None:
    graph, mean, labels = node.graph, node.outputs[0], node.inputs[1]
    assert graph is not None
    assert labels is not None
    nodes: list[ir.Node] = []

    def op(word: str, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        name = f"{mean.name}.{word}"
        given = ir.convenience.convert_attributes(attributes)
        nodes.append(ir.Node("", op_type, inputs, given, outputs=[ir.Value(name=name)], name=name))
        nodes[-1].metadata_props.update(node.metadata_props)
        return nodes[-1].outputs[0]

    def integer(word: str, number: int) -> ir.Value:
        return op(f"{word}.of_labels", "CastLike", op(word, "Constant", value=ir.tensor(np.array(number))), labels)

    attributes = {**node.attributes, "reduction": ir.AttrString("reduction", "sum")}
    made = [ir.Value(name=f"{mean.name}.sum", type=mean.type), *(_copy(out) for out in node.outputs[1:])]
    total = ir.Node(
        node.domain, node.op_type, node.inputs, list(attributes.values()), outputs=made, name=f"{mean.name}.sum"
    )
    total.metadata_props.update(node.metadata_props)
    nodes.append(total)
    counted = None
    places = labels
    if ignored is not None:
        skipped = op("ignored", "Equal", labels, integer("ignore_index", ignored))
        places = op("safe_labels", "Where", skipped, integer("no_label", 0), labels)
        known = (value.dtype for value in (mean, weights, node.inputs[0]) if value is not None and value.dtype)
        counted = op("counts", "Cast", op("counted", "Not", skipped), to=next(known, ir.DataType.FLOAT).value)
    each = counted
    if weights is not None:
        each = op("label_weights", "Gather", weights, places)
        each = each if counted is None else op("counted_weights", "Mul", each, counted)
    assert each is not None
    out = _copy(mean)
    nodes.append(
        ir.Node("", "Div", [made[0], op("weight_sum", "ReduceSum", each, keepdims=0)], outputs=[out], name=node.name)
    )
    nodes[-1].metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, [out, *made[1:]])


def _copy(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape)
