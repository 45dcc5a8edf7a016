"""Gradients of products: the cotangent times the other operand, contracted over what the operand itself lacks."""

from __future__ import annotations

from collections.abc import Sequence

from partc.compiler.autodiff.engine import GradientBuilder, NoGradient, gradient
from partc.compiler.ops.node import LETTERS
from partc.compiler.ops.registry import CONTRIB


@gradient("MatMul")
def matmul(g: GradientBuilder, dy: str, a: str, b: str) -> Sequence[str | None]:
    """dA = dY Bt, dB = At dY."""
    return _products(g, dy, a, b)


@gradient("FusedMatMul", domain=CONTRIB)
def fused_matmul(g: GradientBuilder, dy: str, a: str, b: str) -> Sequence[str | None]:
    """dA = alpha dY Bt, dB = alpha At dY of the matrices as they are multiplied, put back as they were given."""
    alpha = g.attribute("alpha", 1.0)
    dy = dy if alpha == 1.0 else g.Mul(dy, g.constant(alpha, dy))
    found = _products(g, dy, _turned(g, a, "A"), _turned(g, b, "B"))
    return [None if dx is None else _turned_back(g, dx, side) for dx, side in zip(found, "AB", strict=True)]


@gradient("Gemm")
def gemm(g: GradientBuilder, dy: str, a: str, b: str, c: str | None = None) -> Sequence[str | None]:
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


@gradient("Einsum")
def einsum(g: GradientBuilder, dy: str, *operands: str) -> Sequence[str | None]:
    """dXi = the sum of dY times the other operands over all letters but those of Xi."""
    parts, made = _letters(g, operands)
    found: list[str | None] = []
    for k, (own, x) in enumerate(zip(parts, operands, strict=True)):
        if not g.wants(k):
            found.append(None)
            continue
        if len(set(own)) < len(own):
            raise NoGradient(f"Einsum takes a diagonal of its operand {k} ({own})")
        others = [(part, name) for j, (part, name) in enumerate(zip(parts, operands, strict=True)) if j != k]
        there = set(made).union(*(part for part, _ in others))
        kept = "".join(letter for letter in own if letter in there)
        equation = f"{','.join([made, *(part for part, _ in others)])}->{kept}"
        dx = g.Einsum(dy, *(name for _, name in others), equation=equation)
        alone = [at for at, letter in enumerate(own) if letter not in there]
        found.append(g.Expand(g.unsqueeze(dx, *alone), g.shape_of(x)) if alone else dx)
    return found


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
    """A letter a dim of each operand and of the output; an ellipsis gets letters that the equation has not."""
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
