"""Products of matrices: rows, columns and batches pass a cut through; a cut of the contracted dim leaves a sum."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from partc.compiler.ops.factors import rule
from partc.compiler.ops.local import Local
from partc.compiler.ops.operands import dims, operand, rank_of
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.ops.table import CONTRIB, op


@op("MatMul")
def matmul(node: ir.Node) -> Rule | None:
    """`*mk,*kn->*mn`; k contracted; a sum passes in one operand."""
    a, b = rank_of(node.inputs[0]), rank_of(node.inputs[1])
    left, right = "k" if a == 1 else "*mk", "k" if b == 1 else "*kn"
    made = (left + right).replace("k", "").replace("*", "")
    return rule(node, f"{left},{right}->{'*' if '*' in left + right else ''}{made}", linear="each")


@op("FusedMatMul", domain=CONTRIB)
def fused_matmul(node: ir.Node) -> Rule | None:
    """`*mk,*kn->*mn`; k contracted; a sum passes in one operand; transA, transB and batch transposes as the attributes say."""
    flags = {name: bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB", "transBatchA", "transBatchB")}
    a, b = rank_of(node.inputs[0]), rank_of(node.inputs[1])
    if a == 1 or b == 1:
        return matmul(node) if not any(flags.values()) else None
    if flags["transBatchA"] or flags["transBatchB"]:
        batch = "abcdefgh"[: (a or 0) - 2]
        if a != b or not batch:
            return None
        left = _side("m", "k", batch, flags["transA"], flags["transBatchA"])
        right = _side("k", "n", batch, flags["transB"], flags["transBatchB"])
        return rule(node, f"{left},{right}->{batch}mn", linear="each")
    left = "*km" if flags["transA"] else "*mk"
    right = "*nk" if flags["transB"] else "*kn"
    return rule(node, f"{left},{right}->*mn", linear="each")


def _side(row: str, column: str, batch: str, transposed: bool, batch_transposed: bool) -> str:
    """One operand's letters; a transposed batch stands between the matrix's dims: (row, batch, column)."""
    first, last = (column, row) if transposed else (row, column)
    return first + batch + last if batch_transposed else batch + first + last


@op("Gemm")
def gemm(node: ir.Node) -> Rule | None:
    """`mk,kn,*->mn`; k contracted; a sum passes in one operand where there is no bias; the bias is added on one rank alone."""
    left = "km" if node.attributes.get_int("transA", 0) else "mk"
    right = "nk" if node.attributes.get_int("transB", 0) else "kn"
    bias = dims(operand(node, 2))
    if bias is None:
        return rule(node, f"{left},{right},-->mn", linear="each")
    letters = "".join(WHOLE if dim == 1 else letter for dim, letter in zip(reversed(bias), "nm", strict=False))[::-1]
    open_letters = "".join(
        letter for dim, letter in zip(reversed(bias), "nm", strict=False) if not isinstance(dim, int)
    )
    return rule(node, f"{left},{right},{letters}->mn", whole=open_letters, local=bias_once)
