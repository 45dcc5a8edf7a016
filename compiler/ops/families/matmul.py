"""Products of matrices: rows, columns and batches pass a cut through; a cut of the contracted dim leaves a sum."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.families.bias import bias_once
from partc.compiler.ops.node import Dim, dims, operand, rank_of, same
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Rule


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
    flags = {
        name: bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB", "transBatchA", "transBatchB")
    }
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
    a, b = dims(node.inputs[0]), dims(node.inputs[1])
    if a is None or b is None:
        return None
    made = {"m": a[left.index("m")], "n": b[right.index("n")]}
    letters, unsure = "", "" if node.inputs[2] is not None and node.inputs[2].dtype else "k"
    for dim, letter in zip(reversed(bias), "nm", strict=False):
        letters = (WHOLE if isinstance(dim, int) and dim == 1 else letter) + letters
        unsure += letter if not isinstance(dim, int) and not same(dim, made[letter]) else ""
    return rule(node, f"{left},{right},{letters}->mn", whole=unsure, local=bias_once)


@op("Einsum")
def einsum(node: ir.Node) -> Rule | None:
    """`as its equation`; letters that are summed contracted; letters on a diagonal whole; a sum passes in one operand."""
    equation = node.attributes.get_string("equation", "").replace(" ", "").replace("...", "*")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if not arrow:
        once = sorted(letter for letter in set(left) - {",", "*"} if left.count(letter) == 1)
        right = ("*" if "*" in left else "") + "".join(once)
    if len(parts) != len(node.inputs) or ("*" in left and "*" not in right):
        return None
    sizes: dict[str, list[Dim]] = {}
    for part, value in zip(parts, node.inputs, strict=True):
        for letter, dim in _named(part, dims(value) or ()):
            sizes.setdefault(letter, []).append(dim)
    spread = {letter for letter, there in sizes.items() if not all(same(dim, there[0]) for dim in there[1:])}
    diagonal = {letter for part in parts for letter in part if part.count(letter) > 1}
    unsure = {letter for letter in spread if sum(not isinstance(dim, int) for dim in sizes[letter])}
    shown = [_spread(part, dims(value) or (), spread - unsure) for part, value in zip(parts, node.inputs, strict=True)]
    return rule(node, f"{','.join(shown)}->{right}", whole="".join(sorted(diagonal | unsure)), linear="each")


def _named(part: str, shape: tuple[Dim, ...]) -> list[tuple[str, Dim]]:
    """The letters of an operand with their dims; those of an ellipsis are left out."""
    head, _, tail = part.partition("*")
    return [*zip(head, shape, strict=False), *(zip(tail, shape[len(shape) - len(tail) :], strict=True) if tail else ())]


def _spread(part: str, shape: tuple[Dim, ...], spread: set[str]) -> str:
    """The operand's letters, with those whose dim of 1 stands for a larger one whole."""
    ones = {letter for letter, dim in _named(part, shape) if letter in spread and dim == 1}
    return "".join(WHOLE if letter in ones else letter for letter in part)


@op("MatMulInteger")
def matmul_integer(node: ir.Node) -> Rule | None:
    """`*mk,*kn,m,n->*mn`; k contracted; zero points as one number stay whole."""
    if min(rank_of(node.inputs[0]) or 0, rank_of(node.inputs[1]) or 0) < 2:
        return None
    points = [_points(operand(node, 2), "m"), _points(operand(node, 3), "n")]
    return None if None in points else rule(node, f"*mk,*kn,{points[0]},{points[1]}->*mn")


@op("QLinearMatMul")
def qlinear_matmul(node: ir.Node) -> Rule | None:
    """`*mk,_,_,*kn,_,_,_,_->*mn`; k whole; scales and zero points of rows and columns are cut with them."""
    if min(rank_of(node.inputs[0]) or 0, rank_of(node.inputs[3]) or 0) < 2:
        return None
    points = [_points(operand(node, k), letter) for k, letter in ((1, "m"), (2, "m"), (4, "n"), (5, "n"))]
    scale, point = (operand(node, k) for k in (6, 7))
    if None in points or not (_is_single(scale) and _is_single(point)):
        return None
    return rule(node, "*mk,{},{},*kn,{},{},_,_->*mn".format(*points), whole="k")


def _points(value: ir.Value | None, letter: str) -> str | None:
    """The part for scales or zero points: one number for all, or one for each row or column; None where they are neither."""
    shape = dims(value)
    if shape is None or _is_single(value):
        return "_"
    return letter if len(shape) == 1 and isinstance(shape[0], int) else None


def _is_single(value: ir.Value | None) -> bool:
    shape = dims(value)
    return shape is None or shape in ((), (1,))
