"""The number of operations and bytes of a node, from the factors of its op's entry in the op table.

    MatMul *mk,*kn->*mn     the product of all factors, as k is contracted between two operands
    Conv, Attention, LSTM   what the entry itself says
    Relu, ReduceSum, ...    the elements of its largest operand
    Reshape, Identity, ...  nothing: a view

Dims are numbers or expressions in the symbols, so that a count is a sum of products of these. `work` compares nodes where no machine is
known: the larger of the multiply-adds and of what moving its operands costs, BYTE multiply-adds for each byte, about what a core or an
accelerator does meanwhile in single precision. So a chain of elementwise ops counts beside the products, as it does in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.ops.registry import Entry, entry_of
from partc.compiler.ops.rule import WHOLE
from partc.compiler.ops.work import Dims

BYTE = 4
"""Multiply-adds in the time in which one byte is moved."""
VIEW, PRODUCT = "view", "product"
"""The kernels of ops that compute and move nothing, and of those that multiply matrices."""
Known: TypeAlias = Dims | None
"""The dims of an operand; None is one that is absent, or whose dims are unknown."""


def products(
    node: ir.Node, inputs: Sequence[Known], outputs: Sequence[Known], at: Callable[[int | str], int]
) -> list[Dims]:
    """The multiply-adds of a node as a sum of products of dims; `at`: the size of a dim, by which the largest operand is found."""
    entry = entry_of(node)
    if entry is not None and entry.work.kernel == VIEW:
        return []
    if (
        entry is not None
        and inputs
        and all(one is not None for one in inputs[:2])
        and outputs
        and outputs[0] is not None
    ):
        if entry.work.multiply_adds is not None:
            return list(entry.work.multiply_adds(node, [one or () for one in inputs], outputs[0]))
        if (factors := _factors(entry, node, inputs, outputs)) is not None:
            return [factors]
    known = [one for one in (*inputs, *outputs) if one is not None]
    return [max(known, key=lambda dims: math.prod(map(at, dims)))] if known else []


def multiply_adds(node: ir.Node, inputs: Sequence[Known], outputs: Sequence[Known]) -> int:
    """The multiply-adds of a node, of the sizes of its operands."""
    return sum(math.prod(map(int, one)) for one in products(node, inputs, outputs, int))


def work(node: ir.Node, inputs: Sequence[Known], outputs: Sequence[Known], moved: int) -> int:
    """The cost of a node in multiply-adds; `moved`: the bytes of its operands."""
    entry = entry_of(node)
    if entry is not None and entry.work.kernel == VIEW:
        return 0
    return max(multiply_adds(node, inputs, outputs), BYTE * moved)


def _factors(entry: Entry, node: ir.Node, inputs: Sequence[Known], outputs: Sequence[Known]) -> Known:
    """The dims of the factors of a product of two operands, those of its output and what is contracted; None for any other node."""
    if len(inputs) < 2 or entry.work.kernel != PRODUCT:
        return None
    shown = ir.Node(
        node.domain,
        node.op_type,
        inputs=[
            None if dims is None else ir.Value(name=f"i{k}", shape=ir.Shape(dims)) for k, dims in enumerate(inputs)
        ],
        attributes=node.attributes.values(),
        outputs=[
            ir.Value(name=f"o{k}", shape=None if dims is None else ir.Shape(dims)) for k, dims in enumerate(outputs)
        ],
    )
    rule, contracted = entry.rule(shown), dict[str, int | str]()
    made = {WHOLE, *(letter for one in rule.outputs for letter in one or "")}
    for letters, dims in zip(rule.inputs, inputs, strict=False):
        contracted.update(
            (letter, dim) for letter, dim in zip(letters or "", dims or (), strict=False) if letter not in made
        )
    return (*(outputs[0] or ()), *contracted.values()) if contracted else None
