"""What onnxruntime's CUDA provider has no kernel for, though its CPU provider has: such nodes are proposed for the CPU.

A short table of the ops that models have, and of those that take floats alone on CUDA. Source: docs/OperatorKernels.md of onnxruntime,
commit 001d12d2623f. It need not be complete: a node on cuda without a kernel is refused by name when an artifact is loaded.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.graph import nodes_of

_MISSING = {
    "Col2Im",
    "ConvInteger",
    "Cosh",
    "DFT",
    "Det",
    "DynamicQuantizeLinear",
    "GlobalLpPool",
    "Hardmax",
    "LpNormalization",
    "LpPool",
    "MaxRoiPool",
    "MaxUnpool",
    "Mean",
    "MeanVarianceNormalization",
    "MelWeightMatrix",
    "Mish",
    "Multinomial",
    "Optional",
    "QLinearConv",
    "QLinearMatMul",
    "RegexFullMatch",
    "STFT",
    "Sinh",
    "SplitToSequence",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "Tan",
    "TfIdfVectorizer",
    "Unique",
}
_FLOATS_ALONE = frozenset(("Gemm", "MatMul", "Pad", "Relu", "Sum"))
_INTEGERS = tuple(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))


def without_kernel(node: ir.Node) -> str:
    """What a node, or one inside of it, does that CUDA has no kernel for: `Unique`, `MatMul of int32`; empty where there is nothing."""
    return next((found for one in nodes_of([node]) if (found := _missing(one))), "")


def _missing(node: ir.Node) -> str:
    if node.domain not in ("", "ai.onnx"):
        return ""
    if node.op_type in _MISSING:
        return node.op_type
    first = next((value.dtype for value in node.inputs if value is not None), None)
    if first is ir.DataType.STRING:
        return f"{node.op_type} of strings"
    if node.op_type in _FLOATS_ALONE and first in _INTEGERS:
        return f"{node.op_type} of {first.name.lower()}"
    return ""
