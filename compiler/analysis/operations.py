"""How much a node computes and moves at given sizes: estimates that compare nodes, and balance and order their stages.

    MatMul [m, k] [k, n]     m*n*k multiply-adds
    Conv                     the elements of its output times those of one filter
    Relu, ReduceSum, ...     the elements of its largest operand
    Reshape, Identity, ...   nothing

`work` is the larger of the multiply-adds and of what moving its operands costs: BYTE multiply-adds for each byte, about what a core or an
accelerator does meanwhile in single precision. So a chain of elementwise ops counts beside the products, as it does in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

BYTE = 4
"""Multiply-adds in the time in which one byte is moved."""
VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze", "Constant"))
"""Ops that compute and move nothing."""

Sizes: TypeAlias = Sequence[int] | None


def multiply_adds(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> int:
    """The multiply-adds of a node, of the sizes of its operands; None is an operand that is absent, or whose sizes are unknown."""
    if node.op_type in VIEWS:
        return 0
    rule = _PRODUCTS.get(node.op_type)
    if rule is not None and len(inputs) > 1 and inputs[0] and inputs[1] and outputs and outputs[0] is not None:
        return rule(node, inputs, outputs[0])
    return max((math.prod(sizes) for sizes in (*inputs, *outputs) if sizes is not None), default=0)


def work(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes], moved: int) -> int:
    """What a node costs, in multiply-adds; `moved`: the bytes of its operands."""
    return 0 if node.op_type in VIEWS else max(multiply_adds(node, inputs, outputs), BYTE * moved)


def _matmul(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    first = inputs[0] or (1,)
    return math.prod(made) * first[-1]


def _gemm(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    first = inputs[0] or (1,)
    return math.prod(made) * first[0 if node.attributes.get_int("transA", 0) else -1]


def _conv(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    return math.prod(made) * math.prod((inputs[1] or (1,))[1:])


def _conv_transpose(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    return math.prod(inputs[0] or ()) * math.prod((inputs[1] or (1,))[1:])


def _einsum(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    terms = node.attributes.get_string("equation", "").replace(" ", "").split("->")[0].split(",")
    found: dict[str, int] = {}
    for term, sizes in zip(terms, inputs, strict=False):
        rest = len(sizes or ()) - len(term.replace("...", ""))
        letters = term.replace("...", "".join(chr(0x100 + k) for k in range(rest)))
        for letter, size in zip(letters, sizes or (), strict=False):
            found[letter] = max(found.get(letter, 1), size)
    return math.prod(found.values())


def _attention(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    keys = inputs[1] or (1, 1)
    return 2 * math.prod(inputs[0] or ()) * keys[-2]


def _recurrent(node: ir.Node, inputs: Sequence[Sizes], made: Sequence[int]) -> int:
    steps = math.prod((inputs[0] or ())[:2])
    return steps * sum(math.prod(sizes or ()) for sizes in inputs[1:3])


_PRODUCTS: Mapping[str, Callable[[ir.Node, Sequence[Sizes], Sequence[int]], int]] = {
    **dict.fromkeys(("MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("Gemm", "FusedGemm"), _gemm),
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger", "DeformConv"), _conv),
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), _attention),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
}
