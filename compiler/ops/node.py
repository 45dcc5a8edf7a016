"""Facts about a node for a rule: dims, axes, integers that are constants, the opset that gives an op its meaning; and a key of equal
nodes.

A dim is an integer or a symbolic expression. Two dims are `same` only where that is certain: equal integers, or equal
expressions; a dim of which nothing is known is equal to none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

Dim: TypeAlias = "int | ir.SymbolicDim"

FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The types in which gradients flow."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NEWEST = 21


def operand(node: ir.Node, k: int) -> ir.Value | None:
    """The node's input `k`, or None where it is absent."""
    return node.inputs[k] if k < len(node.inputs) else None


def dims(value: ir.Value | None) -> tuple[Dim, ...] | None:
    """The dims of a value, or None where it is absent or its rank is unknown."""
    return None if value is None or value.shape is None else tuple(value.shape.dims)


def rank_of(value: ir.Value | None) -> int | None:
    """The rank of a value, or None where it is absent or unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def same(a: Dim, b: Dim) -> bool:
    """Whether two dims are certainly equal."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.value is not None and b.value is not None and (a.value == b.value or _equal(a.value, b.value))


@functools.lru_cache(maxsize=4096)
def _equal(a: str, b: str) -> bool:
    """Whether two expressions are the same number whatever their symbols are: `2*b` and `b + b`."""
    from partc.compiler.dims.normal import normal
    from partc.compiler.dims.reading import read

    one, other = read(a), read(b)
    return one is not None and other is not None and normal(one - other, {}) == 0


def single(number: Any) -> Any:
    """A floating-point attribute as ONNX stores it, in 32 bits: so are defaults, which a float64 node takes widened. Others as they are."""
    if isinstance(number, list | tuple):
        return [single(one) for one in number]
    return float(np.float32(number)) if isinstance(number, float) else number


def constant_ints(node: ir.Node, k: int) -> tuple[int, ...] | None:
    """The integers of input `k` where it is a constant, else None."""
    value = operand(node, k)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tuple(int(number) for number in tensor.numpy().ravel())


def axes_of(node: ir.Node, rank: int, k: int = 1) -> tuple[int, ...] | None:
    """The `axes` of a node, an attribute or constant input `k`, counted from 0; () where none are given, None where unknown."""
    given: Sequence[int] | None = node.attributes.get_ints("axes")
    if given is None and operand(node, k) is not None:
        given = constant_ints(node, k)
        if given is None:
            return None
    return tuple(sorted(counted(axis, rank) for axis in given or ()))


def axis_of(node: ir.Node, rank: int, default: int, name: str = "axis") -> int:
    """The attribute `axis`, counted from 0."""
    return counted(node.attributes.get_int(name, default), rank)


def counted(axis: int, rank: int) -> int:
    """An axis counted from 0, of one that may count from the end."""
    return axis + rank if axis < 0 else axis


def opset_of(node: ir.Node) -> int:
    """The opset version of the node's domain; `_NEWEST` where the node is in no graph that has it."""
    if node.version is not None:
        return node.version
    versions = {} if node.graph is None else node.graph.opset_imports
    return versions.get(node.domain, versions.get("ai.onnx", _NEWEST) if node.domain == "" else _NEWEST)


def node_key(node: ir.Node) -> tuple[object, ...]:
    """A key that is equal for nodes with the same op, attributes, and names of operands and results."""
    attributes = [one for _, one in sorted(node.attributes.items())]
    return (
        node.domain,
        node.op_type,
        tuple(value and value.name for value in node.inputs),
        tuple(value.name for value in node.outputs),
        tuple(ir.serde.serialize_attribute(one).SerializeToString(deterministic=True) for one in attributes),
    )
