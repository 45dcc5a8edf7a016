"""Reductions that apply a function to a sum, as the sum and the function: then the sum may be sharded, and the rest is element-wise.

ReduceL2(x)       Sqrt(ReduceSumSquare(x))
ReduceLogSum(x)   Log(ReduceSum(x))
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.graph import WRITTEN, operands_of

BENT = {"ReduceL2": ("ReduceSumSquare", "Sqrt"), "ReduceLogSum": ("ReduceSum", "Log")}


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
