"""Ops as two that may be sharded better: reductions that apply a function to a sum, and classifiers whose labels are texts.

ReduceL2(x)                                       Sqrt(ReduceSumSquare(x))
ReduceLogSum(x)                                   Log(ReduceSum(x))
LinearClassifier(x) {labels 'no', 'yes'}          CategoryMapper(LinearClassifier(x) {labels 0, 1})

A sum may be sharded where what is computed of it may not. Texts are not sent between ranks, so a classifier that made them would run
whole on the rank that delivers them; numbers are sent there, and named there.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.graph import WRITTEN, operands_of

TABULAR = "ai.onnx.ml"
NUMBERED = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
"""By classifier the attribute of labels that are numbers."""
BENT = {"ReduceL2": ("ReduceSumSquare", "Sqrt"), "ReduceLogSum": ("ReduceSum", "Log")}


def number_labels(node: ir.Node) -> ir.Node | None:
    """Gives a classifier whose labels are texts numbers for labels, and returns the node after it that makes the texts; else None."""
    labels = node.attributes.get_strings("classlabels_strings") if node.domain == TABULAR else None
    graph, out = node.graph, node.outputs[0]
    if not labels or node.op_type not in NUMBERED or graph is None or not out.name:
        return None
    numbers = list(range(len(labels)))
    del node.attributes["classlabels_strings"]
    node.attributes[NUMBERED[node.op_type]] = ir.AttrInt64s(NUMBERED[node.op_type], numbers)
    name, out.name = out.name, f"{out.name}.number"
    made = ir.Value(name=name, shape=out.shape, type=out.type)
    out.type = ir.TensorType(ir.DataType.INT64)
    out.replace_all_uses_with(made, replace_graph_outputs=True)
    attributes = [ir.AttrInt64s("cats_int64s", numbers), ir.AttrStrings("cats_strings", list(labels))]
    mapper = ir.Node(TABULAR, "CategoryMapper", [out], attributes, outputs=[made], name=f"{node.name}.labels")
    mapper.metadata_props.update(node.metadata_props)
    graph.insert_after(node, mapper)
    return mapper


def decompose(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Replaces the node in its graph by the two that make it, and gives these; None where the op is not in `BENT`.

    The node's output keeps its value and name; the sum is named `<output>.sum` and has the output's shape and type.
    """
    parts = BENT.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    graph = node.graph
    if parts is None or graph is None:
        return None
    out = node.outputs[0]
    total = ir.Value(name=f"{out.name}.sum", shape=out.shape, type=out.type)
    made = ir.Value(name=out.name, shape=out.shape, type=out.type)
    attributes = list(node.attributes.values())
    first = ir.Node(node.domain, parts[0], list(node.inputs), attributes, outputs=[total], name=f"{node.name}.sum")
    second = ir.Node(node.domain, parts[1], [total], outputs=[made], name=node.name)
    second.meta[WRITTEN] = operands_of(node)
    for one in (first, second):
        one.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [first, second], [out], [made])
    return first, second
