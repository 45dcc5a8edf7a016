"""Computes integers and booleans of a model that are known before a run: counters, trip counts, conditions, sizes.

c = Less(Add(k, 1), 5), k = 2     ->     [True]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from partc.compiler.ir.value_info import Array

_LARGEST = 1 << 12
"""The most elements of a constant that is computed here."""
_COMPUTED = frozenset(
    (
        *("Abs", "Add", "And", "Cast", "Concat", "Div", "Equal", "Expand", "Gather", "Greater", "GreaterOrEqual"),
        *("Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "ReduceMax"),
        *("ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze"),
        *("Where", "Xor"),
    )
)
"""Ops on integers and booleans that are computed here."""


def known_number(value: ir.Value | None, memo: dict[ir.Value, Array | None], opset: int) -> Array | None:
    """Returns the integers or booleans that a value always has; None if only the run knows them. `memo`: those of other values."""
    if value is None:
        return None
    if value not in memo:
        memo[value] = _computed(value, memo, opset)
    return memo[value]


def _computed(value: ir.Value, memo: dict[ir.Value, Array | None], opset: int) -> Array | None:
    constant = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    if constant is not None:
        small = constant.size <= _LARGEST and (constant.dtype.is_integer() or constant.dtype == ir.DataType.BOOL)
        return constant.numpy() if small else None
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or len(node.outputs) != 1 or node.op_type not in _COMPUTED:
        return None
    if node.op_type in ("Shape", "Size"):
        return _extents(node)
    operands = [known_number(operand, memo, opset) for operand in node.inputs]
    if any(one is None and operand is not None for one, operand in zip(operands, node.inputs, strict=True)):
        return None
    if node.op_type in ("Div", "Mod") and any((one < 0).any() for one in operands if one is not None):
        return None
    return _evaluated(node, operands, opset)


def _evaluated(node: ir.Node, operands: Sequence[Array | None], opset: int) -> Array | None:
    """The result of a node; None if it is large, or not integers or booleans."""
    from onnx.reference import ReferenceEvaluator

    names = [f"x{k}" if one is not None else "" for k, one in enumerate(operands)]
    attributes = [ir.serde.serialize_attribute(one) for one in node.attributes.values()]
    proto = onnx.NodeProto(op_type=node.op_type, input=names, output=["y"], attribute=attributes)
    ports = [onnx.ValueInfoProto(name=name) for name in names if name]
    graph = onnx.GraphProto(name="constant", node=[proto], input=ports, output=[onnx.ValueInfoProto(name="y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    feeds = {name: one for name, one in zip(names, operands, strict=True) if one is not None}
    try:
        (made,) = ReferenceEvaluator(model).run(None, feeds)
    except Exception:  # the op's own kinds, for operands that do not fit: the run refuses them
        return None
    array = np.asarray(made)
    return array if array.dtype.kind in "iub" and array.size <= _LARGEST else None


def _extents(node: ir.Node) -> Array | None:
    """The result of a Shape or Size whose operand has a known shape."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None or not shape.is_static():
        return None
    extents = np.array(shape.numpy(), np.int64)
    if node.op_type == "Size":
        return np.array(extents.prod(), np.int64)
    return extents[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(extents))]
