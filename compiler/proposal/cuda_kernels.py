"""Nodes without a kernel in onnxruntime's CUDA provider but with one in its CPU provider: they are proposed for the CPU."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ir.graph import nodes_of
from partc.runtime.artifact.graph.kernels import FLOATS_ON_CUDA, NOT_ON_CUDA

_INTEGERS = tuple(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))


def without_kernel(node: ir.Node) -> str:
    """What a node, or one inside of it, does that CUDA has no kernel for: `Unique`, `MatMul of int32`; empty where there is nothing."""
    return next((found for one in nodes_of([node]) if (found := _missing(one))), "")


def _missing(node: ir.Node) -> str:
    if node.domain not in ("", "ai.onnx"):
        return ""
    if node.op_type in NOT_ON_CUDA:
        return node.op_type
    first = next((value.dtype for value in node.inputs if value is not None), None)
    if first is ir.DataType.STRING:
        return f"{node.op_type} of strings"
    if node.op_type in FLOATS_ON_CUDA and first in _INTEGERS:
        return f"{node.op_type} of {first.name.lower()}"
    return ""
