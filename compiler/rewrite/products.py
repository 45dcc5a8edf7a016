"""The products of a model with constant weights, which may be quantized, and to which adapters add.

A weight has two dims, or it is a stack of experts' matrices, of which each entry's product selects one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.blocked import BLOCKED, BlockedWeight

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class Picked:
    """The matrices of a stack `weights` that `ids` selects; `swapped`: with rows as columns. `nodes`: those that make them, in order."""

    weights: ir.Value
    ids: ir.Value
    swapped: bool
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Product:
    """A product of activations with a constant weight of two dims; `transposed`: whether the weight is [N, K].

    `table`: whether its rows are looked up, which is the product with a one-hot vector: [V, K] has the form of a transposed weight.
    `picked`: the selection, if the weight is [experts, K, N] or [experts, N, K], and a row's product has one of its matrices.
    """

    weight: ir.Value
    transposed: bool
    bias: ir.Value | None = None
    table: bool = False
    picked: Picked | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """K, the contracted dim, and N."""
        assert self.weight.const_value is not None
        first, second = self.weight.const_value.shape.numpy()[-2:]
        return (second, first) if self.transposed else (first, second)

    @property
    def blocked(self) -> BlockedWeight | None:
        """The blocks of the weight in the model's files; None if it is not in blocks."""
        tensor = self.weight.const_value
        is_product = tensor is not None and self.transposed and not self.table and self.picked is None
        return tensor.meta.get(BLOCKED) if is_product and tensor is not None else None


def products(nodes: Iterable[ir.Node]) -> dict[ir.Node, Product]:
    """Returns the nodes that can be quantized."""
    return {node: found for node in nodes if (found := _product(node)) is not None}


def _product(node: ir.Node) -> Product | None:
    """Returns the product of a node with a weight; None if the node has no quantized form."""
    attributes = node.attributes
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm", "Gather") or len(node.inputs) < 2:
        return None
    if node.op_type == "Gather":
        table = node.inputs[0]
        is_table = attributes.get_int("axis", 0) == 0 and _is_weight(table)
        return Product(table, True, table=True) if is_table and table is not None else None
    if node.op_type == "MatMul":
        for side, value in enumerate(node.inputs):
            stack = picked(value)
            if stack is not None and _is_weight(stack.weights, 3):
                return Product(stack.weights, (side == 0) != stack.swapped, picked=stack)
    weight, transposed, bias = node.inputs[1], False, None
    if node.op_type == "Gemm":
        factors = [attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        if factors != [1.0, 1.0] or attributes.get_int("transA", 0) == 1:
            return None
        transposed = attributes.get_int("transB", 0) == 1
        bias = node.inputs[2] if len(node.inputs) > 2 else None
    while weight is not None and (producer := weight.producer()) is not None:
        if producer.op_type != "Transpose" or producer.attributes.get_ints("perm", (1, 0)) not in ([1, 0], (1, 0)):
            return None
        weight, transposed = producer.inputs[0], not transposed
    return Product(weight, transposed, bias) if _is_weight(weight) and weight is not None else None


def picked(value: ir.Value | None) -> Picked | None:
    """Returns the selection of a stack's matrices that a value is; None for another value."""
    node = value.producer() if value is not None else None
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Transpose":
        found = picked(node.inputs[0])
        is_swap = tuple(node.attributes.get_ints("perm") or ()) == (0, 2, 1)
        return replace(found, swapped=not found.swapped, nodes=(*found.nodes, node)) if found and is_swap else None
    axis = {"Gather": "axis", "GatherND": "batch_dims"}.get(node.op_type)
    if axis is None or node.attributes.get_int(axis, 0) != 0 or node.inputs[0] is None or node.inputs[1] is None:
        return None
    return Picked(node.inputs[0], node.inputs[1], False, (node,))


def _is_weight(value: ir.Value | None, rank: int = 2) -> bool:
    """Whether a value is a float initializer with `rank` dims."""
    tensor = value.const_value if value is not None and value.is_initializer() else None
    return tensor is not None and tensor.dtype in _FLOATS and tensor.shape.rank() == rank and tensor.size > 0
