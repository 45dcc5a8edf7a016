"""Rounds keys and values to 8-bit integers, with a scale for each channel of a head that is the same for all entries.

    x  ->  Mul(Clip(Round(Div(x, scale)), -128, 127), scale)        scale [1, heads, 1, size]

onnxruntime's fused attention does the same with an int8 cache, element by element: a model with these ops, run as it is, is the
reference of such a cache. They compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.rewrite.generation.node_builder import NodeBuilder

LEAST, MOST = -128, 127


@dataclass(frozen=True)
class Rounding:
    """The parts of a rounded value: the value before rounding, the integers in float32, the scale, and the value's element type."""

    source: ir.Value
    whole: ir.Value
    scale: ir.Value
    type: ir.DataType


def round_entries(build: NodeBuilder, value: ir.Value, scale: ir.Value) -> ir.Value:
    """Returns the rounded entries of a cache, in the element type of the value."""
    kind = value.dtype or ir.DataType.FLOAT
    bounds = [build.constant(word, np.float32(number)) for word, number in (("least", LEAST), ("most", MOST))]
    steps = build.op("steps", "Div", [_cast(build, value, kind, ir.DataType.FLOAT), scale])
    whole = build.op("whole", "Clip", [build.op("nearest", "Round", [steps]), *bounds])
    return scaled(build, whole, scale, kind)


def scaled(build: NodeBuilder, whole: ir.Value, scale: ir.Value, kind: ir.DataType) -> ir.Value:
    """Returns integers in float32 multiplied by their scales, in the element type `kind`."""
    return _cast(build, build.op("scaled", "Mul", [whole, scale]), ir.DataType.FLOAT, kind)


def _cast(build: NodeBuilder, value: ir.Value, before: ir.DataType, kind: ir.DataType) -> ir.Value:
    return value if before == kind else build.op(f"as_{kind.name.lower()}", "Cast", [value], to=kind.value)


def _is_scale(value: ir.Value) -> bool:
    """Whether a value is a constant with one element for each channel of a head."""
    dims = () if value.const_value is None else value.const_value.shape.numpy()
    return value.is_initializer() and len(dims) == 4 and (dims[0], dims[2]) == (1, 1)


def rounding_of(value: ir.Value | None) -> Rounding | None:
    """Returns the parts of a value that `round_entries` made; None for any other value."""
    kind, node = ir.DataType.FLOAT, None if value is None else value.producer()
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        kind, node = ir.DataType(node.attributes["to"].as_int()), node.inputs[0].producer()
    ops, chain = ("Mul", "Clip", "Round", "Div"), list[ir.Node]()
    for op in ops:
        if node is None or node.op_type != op or node.inputs[0] is None:
            return None
        chain.append(node)
        node = node.inputs[0].producer()
    multiplied, clipped, _, divided = chain
    scale, source = multiplied.inputs[1], divided.inputs[0]
    if scale is None or source is None or divided.inputs[1] is not scale or not _is_scale(scale):
        return None
    bounds = [None if value is None else value.const_value for value in clipped.inputs[1:]]
    if [None if bound is None else float(bound.numpy()) for bound in bounds] != [LEAST, MOST]:
        return None
    if kind != ir.DataType.FLOAT and node is not None and node.op_type == "Cast":
        source = node.inputs[0]
    return None if source is None else Rounding(source, clipped.outputs[0], scale, kind)
