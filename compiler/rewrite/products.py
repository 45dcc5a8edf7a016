"""The products of a model with constant weights of two dims, whose weights may be quantized, and to which adapters add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.blocked import BLOCKED, BlockedWeight

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True)
class Product:
    """A product of activations with a constant weight of two dims; `transposed`: the weight is [N, K].

    `table`: its rows are looked up, which is the product with a one-hot vector: [V, K] lies as a transposed weight does.
    """

    weight: ir.Value
    transposed: bool
    bias: ir.Value | None = None
    table: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """K, the contracted dim, and N."""
        assert self.weight.const_value is not None
        first, second = self.weight.const_value.shape.numpy()
        return (second, first) if self.transposed else (first, second)

    @property
    def blocked(self) -> BlockedWeight | None:
        """The blocks that the weight has in the model's files."""
        tensor = self.weight.const_value
        is_product = tensor is not None and self.transposed and not self.table
        return tensor.meta.get(BLOCKED) if is_product and tensor is not None else None


def products(nodes: Iterable[ir.Node]) -> dict[ir.Node, Product]:
    """The nodes that can be quantized."""
    return {node: found for node in nodes if (found := _product(node)) is not None}


def _product(node: ir.Node) -> Product | None:
    """The product of a node with a weight; None of a node that has no quantized form."""
    attributes = node.attributes
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm", "Gather") or len(node.inputs) < 2:
        return None
    if node.op_type == "Gather":
        table = node.inputs[0]
        is_table = attributes.get_int("axis", 0) == 0 and _is_weight(table)
        return Product(table, True, table=True) if is_table and table is not None else None
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


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a float initializer of two dims."""
    tensor = value.const_value if value is not None and value.is_initializer() else None
    return tensor is not None and tensor.dtype in _FLOATS and tensor.shape.rank() == 2 and tensor.size > 0
