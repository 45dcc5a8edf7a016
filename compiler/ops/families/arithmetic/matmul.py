"""Products of matrices: rows, columns and batches may be sharded; sharding the contracted dim leaves a partial sum.

The gradient is the cotangent times the other operand, contracted over what the operand itself lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.ops.families.arithmetic.bias import bias_once
from partc.compiler.ops.node import LETTERS, Dim, dims, operand, rank_of, same
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Rule

matmul = op("MatMul", factors="*mk,*kn->*mn", contracted="k", linear="each", precision="low", kernel="product")


@matmul.sharding
def _product(node: ir.Node) -> Rule | None:
    a, b = rank_of(node.inputs[0]), rank_of(node.inputs[1])
    left, right = "k" if a == 1 else "*mk", "k" if b == 1 else "*kn"
    made = (left + right).replace("k", "").replace("*", "")
    return rule(node, f"{left},{right}->{'*' if '*' in left + right else ''}{made}")


@matmul.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> Sequence[str | None]:
    """dA = dY Bt, dB = At dY."""
    return _products(g, dy, a, b)


fused_matmul = op(
    "FusedMatMul",
    domain=CONTRIB,
    factors="*mk,*kn->*mn",
    contracted="k",
    linear="each",
    remarks="transA, transB and batch transposes as the attributes say",
    precision="low",
    kernel="product",
)


@fused_matmul.sharding
def _(node: ir.Node) -> Rule | None:
    flags = {
        name: bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB", "transBatchA", "transBatchB")
    }
    a, b = rank_of(node.inputs[0]), rank_of(node.inputs[1])
    if a == 1 or b == 1:
        return _product(node) if not any(flags.values()) else None
    if flags["transBatchA"] or flags["transBatchB"]:
        batch = "abcdefgh"[: (a or 0) - 2]
        if a != b or not batch:
            return None
        left = _side("m", "k", batch, flags["transA"], flags["transBatchA"])
        right = _side("k", "n", batch, flags["transB"], flags["transBatchB"])
        return rule(node, f"{left},{right}->{batch}mn")
    left = "*km" if flags["transA"] else "*mk"
    right = "*nk" if flags["transB"] else "*kn"
    return rule(node, f"{left},{right}->*mn")


@fused_matmul.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> Sequence[str | None]:
    """dA = alpha dY Bt, dB = alpha At dY of the transposed operands, transposed back."""
    alpha = g.attribute("alpha", 1.0)
    dy = dy if alpha == 1.0 else g.Mul(dy, g.constant(alpha, dy))
    found = _products(g, dy, _turned(g, a, "A"), _turned(g, b, "B"))
    return [None if dx is None else _turned_back(g, dx, side) for dx, side in zip(found, "AB", strict=True)]


gemm = op(
    "Gemm",
    factors="mk,kn,*->mn",
    contracted="k",
    linear="each",
    remarks="linear without bias, which one rank alone adds",
    precision="low",
    kernel="product",
)


@gemm.sharding
def _(node: ir.Node) -> Rule | None:
    left = "km" if node.attributes.get_int("transA", 0) else "mk"
    right = "nk" if node.attributes.get_int("transB", 0) else "kn"
    bias = dims(operand(node, 2))
    if bias is None:
        return rule(node, f"{left},{right},-->mn")
    a, b = dims(node.inputs[0]), dims(node.inputs[1])
    if a is None or b is None:
        return None
    made = {"m": a[left.index("m")], "n": b[right.index("n")]}
    letters, unsure = "", "" if node.inputs[2] is not None and node.inputs[2].dtype else "k"
    for dim, letter in zip(reversed(bias), "nm", strict=False):
        letters = (WHOLE if isinstance(dim, int) and dim == 1 else letter) + letters
        unsure += letter if not isinstance(dim, int) and not same(dim, made[letter]) else ""
    return rule(node, f"{left},{right},{letters}->mn", replicated=unsure, linear="", local=bias_once)


@gemm.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str, c: str | None = None) -> Sequence[str | None]:
    """dA = alpha dY Bt, dB = alpha At dY, dC = beta dY; transposed where the operands are."""
    left, right = g.attribute("transA", 0), g.attribute("transB", 0)
    alpha, beta = g.attribute("alpha", 1.0), g.attribute("beta", 1.0)
    da = db = dc = None
    if g.wants(0) and left:
        da = g.Gemm(b, dy, transA=right, transB=1, alpha=alpha)
    elif g.wants(0):
        da = g.Gemm(dy, b, transB=1 - right, alpha=alpha)
    if g.wants(1) and right:
        db = g.Gemm(dy, a, transA=1, transB=left, alpha=alpha)
    elif g.wants(1):
        db = g.Gemm(a, dy, transA=1 - left, alpha=alpha)
    if g.wants(2):
        dc = dy if beta == 1.0 else g.Mul(dy, g.constant(beta, dy))
    return da, db, dc


einsum = op(
    "Einsum",
    factors="*,...->*",
    linear="each",
    remarks="factors are the letters of its equation; those that are summed are contracted, those on a diagonal replicated",
    precision="low",
    kernel="product",
)


@einsum.sharding
def _(node: ir.Node) -> Rule | None:
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
    shown = []
    for part, value in zip(parts, node.inputs, strict=True):
        ones = {letter for letter, dim in _named(part, dims(value) or ()) if letter in spread - unsure and dim == 1}
        shown.append("".join(WHOLE if letter in ones else letter for letter in part))
    return rule(node, f"{','.join(shown)}->{right}", replicated="".join(sorted(diagonal | unsure)))


@einsum.gradient
def _(g: GradientBuilder, dy: str, *operands: str) -> Sequence[str | None]:
    """dXi = the sum of dY times the other operands over all letters but those of Xi."""
    parts, output_letters = _letters(g, operands)
    gradients: list[str | None] = []
    for k, (own, x) in enumerate(zip(parts, operands, strict=True)):
        if not g.wants(k):
            gradients.append(None)
            continue
        if len(set(own)) < len(own):
            raise NoGradient(f"Einsum takes a diagonal of its operand {k} ({own})")
        others = [(part, name) for j, (part, name) in enumerate(zip(parts, operands, strict=True)) if j != k]
        there = set(output_letters).union(*(part for part, _ in others))
        kept = "".join(letter for letter in own if letter in there)
        equation = f"{','.join([output_letters, *(part for part, _ in others)])}->{kept}"
        dx = g.Einsum(dy, *(name for _, name in others), equation=equation)
        alone = [at for at, letter in enumerate(own) if letter not in there]
        gradients.append(g.Expand(g.unsqueeze(dx, *alone), g.shape_of(x)) if alone else dx)
    return gradients


matmul_integer = op(
    "MatMulInteger",
    factors="*mk,*kn,m,n->*mn",
    contracted="k",
    remarks="a zero point of one number is replicated",
    kernel="product",
)


@matmul_integer.sharding
def _(node: ir.Node) -> Rule | None:
    if min(rank_of(node.inputs[0]) or 0, rank_of(node.inputs[1]) or 0) < 2:
        return None
    points = [_points(operand(node, 2), "m"), _points(operand(node, 3), "n")]
    return None if None in points else rule(node, f"*mk,*kn,{points[0]},{points[1]}->*mn")


qlinear_matmul = op(
    "QLinearMatMul",
    factors="*mk,_,_,*kn,_,_,_,_->*mn",
    replicated="k",
    remarks="scales and zero points of rows and columns are sharded with them",
    kernel="product",
)


@qlinear_matmul.sharding
def _(node: ir.Node) -> Rule | None:
    if min(rank_of(node.inputs[0]) or 0, rank_of(node.inputs[3]) or 0) < 2:
        return None
    points = [_points(operand(node, k), letter) for k, letter in ((1, "m"), (2, "m"), (4, "n"), (5, "n"))]
    scale, point = (operand(node, k) for k in (6, 7))
    if None in points or not (_is_single(scale) and _is_single(point)):
        return None
    return rule(node, "*mk,{},{},*kn,{},{},_,_->*mn".format(*points), replicated="k")


def _side(row: str, column: str, batch: str, transposed: bool, batch_transposed: bool) -> str:
    """One operand's letters; a transposed batch stands between the matrix's dims: (row, batch, column)."""
    first, last = (column, row) if transposed else (row, column)
    return first + batch + last if batch_transposed else batch + first + last


def _named(part: str, shape: tuple[Dim, ...]) -> list[tuple[str, Dim]]:
    """The letters of an operand with their dims; those of an ellipsis are left out."""
    head, _, tail = part.partition("*")
    return [*zip(head, shape, strict=False), *(zip(tail, shape[len(shape) - len(tail) :], strict=True) if tail else ())]


def _points(value: ir.Value | None, letter: str) -> str | None:
    """The part for scales or zero points: one number for all, or one for each row or column; None where they are neither."""
    shape = dims(value)
    if shape is None or _is_single(value):
        return "_"
    return letter if len(shape) == 1 and isinstance(shape[0], int) else None


def _is_single(value: ir.Value | None) -> bool:
    shape = dims(value)
    return shape is None or shape in ((), (1,))


def _products(g: GradientBuilder, dy: str, a: str, b: str) -> Sequence[str | None]:
    rows, columns = g.rank(a), g.rank(b)
    da = db = None
    if rows == 1 and columns == 1:
        return g.Mul(dy, b), g.Mul(dy, a)
    if rows == 1:
        row = g.unsqueeze(dy, -2)
        da = g.Squeeze(g.MatMul(row, g.mT(b)), g.constant([-2])) if g.wants(0) else None
        return da, g.MatMul(g.unsqueeze(a, -1), row) if g.wants(1) else None
    if columns == 1:
        column = g.unsqueeze(dy, -1)
        da = g.Mul(column, b) if g.wants(0) else None
        return da, g.Squeeze(g.MatMul(g.mT(a), column), g.constant([-1])) if g.wants(1) else None
    if g.wants(0):
        da = g.Gemm(dy, b, transB=1) if rows == columns == 2 else g.MatMul(dy, g.mT(b))
    if g.wants(1):
        db = _weight(g, dy, a) if columns == 2 else g.MatMul(g.mT(a), dy)
    return da, db


def _weight(g: GradientBuilder, dy: str, a: str) -> str:
    """At dY of a matrix that all of a batch is multiplied by: the batch's rows are rows of one product."""
    if g.rank(a) == 2:
        return g.Gemm(a, dy, transA=1)
    shape, made = g.shape(a), g.shape(dy)
    inner, outer = shape[-1] if shape else None, made[-1] if made else None
    if not isinstance(inner, int) or not isinstance(outer, int):
        return g.MatMul(g.mT(a), dy)
    return g.Gemm(g.reshape(a, [-1, inner]), g.reshape(dy, [-1, outer]), transA=1)


def _turned(g: GradientBuilder, x: str, side: str) -> str:
    """An operand as it is multiplied: its batch first, its matrix not transposed."""
    rank = g.rank(x)
    if g.attribute(f"transBatch{side}", 0):
        x = g.Transpose(x, perm=[*range(1, rank - 1), 0, rank - 1])
    return g.mT(x) if g.attribute(f"trans{side}", 0) else x


def _turned_back(g: GradientBuilder, dx: str, side: str) -> str:
    rank = g.rank(dx)
    dx = g.mT(dx) if g.attribute(f"trans{side}", 0) else dx
    return g.Transpose(dx, perm=[rank - 2, *range(rank - 2), rank - 1]) if g.attribute(f"transBatch{side}", 0) else dx


def _letters(g: GradientBuilder, operands: Sequence[str]) -> tuple[list[str], str]:
    """A letter a dim of each operand and of the output; an ellipsis gets letters that the equation lacks."""
    equation = g.attribute("equation").replace(" ", "").replace("...", "*")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if not arrow:
        right = "*" * ("*" in left) + "".join(sorted(one for one in set(left) - {",", "*"} if left.count(one) == 1))
    counts = [g.rank(x) - len(part) + 1 if "*" in part else 0 for part, x in zip(parts, operands, strict=True)]
    most = max(counts)
    free = [letter for letter in LETTERS if letter not in equation][:most]
    spread = [part.replace("*", "".join(free[most - n :])) for part, n in zip(parts, counts, strict=True)]
    return spread, right.replace("*", "".join(free))
