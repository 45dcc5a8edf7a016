"""Finds equal nodes: computes a key of all facts that the rules of sharding and of shapes may read of a node.

Equal layers have equal nodes, so the result of a rule for one node is stored under its key and reused for the others. The law: a rule reads
no fact about a node that is not in its key.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import onnx_ir as ir
from partc.compiler.ir.computed import is_absent

_FEW = 64
_NUMBERS_AND_TEXTS = frozenset(
    ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")
)


def key_of(node: ir.Node) -> Hashable | None:
    """Returns the facts about a node that rules may read, as a key; None where they are too large to compare.

    The key is the op with its opset and attributes, for each operand its dims, type and, if it is a constant, its numbers, and for each
    output its dims and whether it has a name. Of a constant with more than 64 elements, or without numbers, a rule reads only the dims,
    except of integers. Such large integer constants, texts, and nodes with bodies or tensors as attributes have no key.
    """
    domain, graph = node.domain, node.graph
    opsets = {} if graph is None else graph.opset_imports
    key: list[Hashable] = [node.op_type, domain, node.version, opsets.get(domain), opsets.get("ai.onnx")]
    for name, attribute in node.attributes.data.items():
        if attribute.type not in _NUMBERS_AND_TEXTS:
            return None
        key += (name, attribute.value)
    for value in node.inputs:
        if value is None:
            key.append(None)
            continue
        shape = value.shape
        key += (None if shape is None else shape.dims, value.dtype)
        tensor = _constant(value)
        if tensor is not None:
            if tensor.dtype == ir.DataType.STRING:
                return None
            dims: Sequence[Any] = tensor.shape.dims
            if math.prod(dims) <= _FEW and not is_absent(tensor):
                key.append(tensor.tobytes())
            elif not tensor.dtype.is_floating_point():
                return None
    for value in node.outputs:
        shape = value.shape
        key += (None if shape is None else shape.dims, bool(value.name))
    return tuple(key)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """Same as `ir.convenience.get_const_tensor`, but calls it only for the outputs of Constant nodes."""
    if (tensor := value.const_value) is not None:
        return tensor
    producer = value.producer()
    return None if producer is None or producer.op_type != "Constant" else ir.convenience.get_const_tensor(value)
