"""Reductions that apply a function to a sum, as the sum and the function: then the sum may be sharded, and the rest is element-wise.

ReduceL2(x)       Sqrt(ReduceSumSquare(x))      where it trains, of a 1 where the sum is 0, and 0 there: so the gradient of a norm is 0 at 0
ReduceLogSum(x)   Log(ReduceSum(x))
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.graph import WRITTEN, operands_of

BENT = {"ReduceL2": ("ReduceSumSquare", "Sqrt"), "ReduceLogSum": ("ReduceSum", "Log")}


def decompose(node: ir.Node, trains: bool) -> None:
    """Replaces the node in its graph by those that make it, if its op is in `BENT`.

    The node's output keeps its value and name; the sum is named `<output>.sum` and has the output's shape and type.
    """
    parts = BENT.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    graph = node.graph
    if parts is None or graph is None:
        return
    out, nodes = node.outputs[0], list[ir.Node]()

    def add(op_type: str, inputs: list[ir.Value | None], word: str, of: list[ir.Attr] | None = None) -> ir.Value:
        made = ir.Value(name=f"{out.name}.{word}" if word else out.name, shape=out.shape, type=out.type)
        name = f"{node.name}.{word}" if word else node.name
        nodes.append(ir.Node(node.domain, op_type, inputs, of or [], outputs=[made], name=name))
        nodes[-1].metadata_props.update(node.metadata_props)
        return made

    total = add(parts[0], list(node.inputs), "sum", list(node.attributes.values()))
    if node.op_type == "ReduceL2" and trains:
        zero, one = (_number(k, total, add) for k in (0, 1))
        nothing = add("Equal", [total, zero], "is_zero")
        nothing.type = ir.TensorType(ir.DataType.BOOL)
        root = add("Sqrt", [add("Where", [nothing, one, total], "not_zero")], "root")
        made = add("Where", [nothing, zero, root], "")
    else:
        made = add(parts[1], [total], "")
    nodes[-1].meta[WRITTEN] = operands_of(node)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [out], [made])


def _number(number: int, like: ir.Value, add: Callable[..., ir.Value]) -> ir.Value:
    """A number as a scalar in the type of a value, which may not be known."""
    tensor = ir.tensor(np.array(number, (like.dtype or ir.DataType.FLOAT).numpy()), dtype=like.dtype)
    scalar = add("Constant", [], f"number{number}", [ir.AttrTensor("value", tensor)])
    cast = scalar if like.dtype else add("CastLike", [scalar, like], f"number{number}.of_type")
    for value in {scalar, cast}:
        value.shape = ir.Shape([])
    if like.dtype is None:
        scalar.type = ir.TensorType(ir.DataType.FLOAT)
    return cast
