"""The text of a node in the dumps: its outputs, its op, its inputs, and its attributes, sorted by name.

%conv1.Conv = Conv(%x, %conv1.weight) {kernel_shape: [5, 5]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.graph import operand_name

_LONG = 16


def node_text(node: ir.Node, indent: str) -> str:
    """A node with its attributes on one line; bodies follow on lines of their own, deeper than `indent`."""
    return op_text(node, indent, _shown(node.inputs), _shown(node.outputs))


def op_text(node: ir.Node, indent: str, ins: str, outs: str) -> str:
    """A node over operands that are shown so: `%x, _`."""
    op = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    given = sorted(node.attributes.data.items())
    attributes = ", ".join([f"{name}: {_attribute(attr, indent)}" for name, attr in given])
    return f"{outs} = {op}({ins})" + (f" {{{attributes}}}" if attributes else "")


def _shown(values: Sequence[ir.Value | None]) -> str:
    return ", ".join([f"%{name}" if (name := operand_name(value)) else "_" for value in values])


def _attribute(attr: ir.Attr, indent: str) -> str:
    match attr.type:
        case ir.AttributeType.GRAPH:
            return _body(attr.as_graph(), indent)
        case ir.AttributeType.GRAPHS:
            return f"[{', '.join(_body(graph, indent) for graph in attr.as_graphs())}]"
        case ir.AttributeType.TENSOR:
            return _tensor(attr.value)  # as_tensor() asks by a protocol, which takes longer than the text
        case ir.AttributeType.TENSORS:
            return f"[{', '.join(map(_tensor, attr.value))}]"
        case ir.AttributeType.TYPE_PROTO:
            return type_text(attr.value.type)
        case ir.AttributeType.STRING:
            return repr(attr.value)
        case ir.AttributeType.FLOAT:
            return _float(attr.value)
        case ir.AttributeType.FLOATS:
            return f"[{', '.join(map(_float, attr.value))}]"
        case ir.AttributeType.INTS | ir.AttributeType.STRINGS:
            return f"[{', '.join(map(repr, attr.value))}]"
        case _:
            return repr(attr.value)


def _float(value: float) -> str:
    """The shortest text of the float32 that ONNX keeps of an attribute."""
    return str(np.float32(value))


def _tensor(tensor: ir.TensorProtocol) -> str:
    """A short tensor by its items, a long one by its hash."""
    kind = type_text(ir.TensorType(tensor.dtype))
    shape = ", ".join(map(str, tensor.shape.numpy()))
    if tensor.size <= _LONG:
        return f"<{kind}, ({shape})> {tensor.numpy().tolist()}"
    return f"<{kind}, ({shape})> sha256:{hashlib.sha256(tensor.tobytes()).hexdigest()[:16]}"


def _body(graph: ir.Graph, indent: str) -> str:
    inner = indent + "    "
    lines = [f"graph({', '.join(f'%{value.name}' for value in graph.inputs)}) {{"]
    lines += [
        f"{inner}%{name} = {_tensor(value.const_value)}"
        for name, value in graph.initializers.items()
        if value.const_value is not None
    ]
    lines += [f"{inner}{node_text(node, inner)}" for node in graph]
    lines.append(f"{inner}Return({', '.join(f'%{value.name}' for value in graph.outputs)})")
    return "\n".join([*lines, f"{indent}}}"])
