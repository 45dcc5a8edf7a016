"""Gradients of reductions: the cotangent of the result, spread over what was reduced.

With `noop_with_empty_axes` and no axes nothing is summed, and what an op does beside its sum is done to every element:
ReduceSumSquare gives the squares, ReduceL1 absolute values, ReduceLogSum logarithms.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from partc.compiler.autodiff.engine import GradientBuilder, gradient, no_gradient

no_gradient("ArgMax", "ArgMin")

Reduction = Callable[[GradientBuilder, str, str, str | None], str]


def _reduction(*op_types: str) -> Callable[[Reduction], Reduction]:
    """Registers a rule that sees the cotangent with its reduced dims as 1."""

    def decorate(rule: Reduction) -> Reduction:
        def whole(g: GradientBuilder, dy: str, x: str, axes: str | None = None) -> str:
            return rule(g, _kept(g, dy, x, axes), x, axes)

        gradient(*op_types)(whole)
        return rule

    return decorate


@_reduction("ReduceSum")
def reduce_sum(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY along what was summed."""
    return dy if _is_noop(g, axes) else g.Expand(dy, g.shape_of(x))


@_reduction("ReduceMean")
def reduce_mean(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY / n along the n that were summed."""
    if _is_noop(g, axes):
        return dy
    known = _axes(g, x, axes)
    count = g.Div(g.size_of(x, like=x), g.size_of(dy, like=x)) if known is None else g.size_of(x, known, like=x)
    return g.Expand(g.Div(dy, count), g.shape_of(x))


@_reduction("ReduceMax", "ReduceMin")
def reduce_extreme(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY where X is the extreme; equal ones share it."""
    if _is_noop(g, axes):
        return dy
    chosen = g.mask(g.Equal(x, _kept(g, g.output(0), x, axes)), x)
    known = _axes(g, x, axes)
    along = axes if known is None else g.constant(np.array(known, np.int64))
    noop = int(known is None and g.attribute("noop_with_empty_axes", 0))
    return g.Mul(chosen, g.Div(dy, g.ReduceSum(chosen, along, keepdims=1, noop_with_empty_axes=noop)))


@_reduction("ReduceL1")
def reduce_l1(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY sign(X)."""
    return g.Mul(dy, g.Sign(x))


@_reduction("ReduceL2")
def reduce_l2(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY X / Y, and 0 where Y is."""
    norm = _kept(g, g.output(0), x, axes)
    zero = g.constant(0, norm)
    share = g.Where(g.Equal(norm, zero), zero, g.Div(dy, norm))
    return g.Mul(share, x)


@_reduction("ReduceSumSquare")
def reduce_sum_square(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = 2 dY X."""
    return g.Mul(g.Add(dy, dy), x)


@_reduction("ReduceLogSum")
def reduce_log_sum(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY / exp(Y)."""
    return g.Expand(g.Div(dy, g.Exp(_kept(g, g.output(0), x, axes))), g.shape_of(x))


@_reduction("ReduceLogSumExp")
def reduce_log_sum_exp(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY exp(X - Y)."""
    return g.Mul(dy, g.Exp(g.Sub(x, _kept(g, g.output(0), x, axes))))


@_reduction("ReduceProd")
def reduce_product(g: GradientBuilder, dy: str, x: str, axes: str | None) -> str:
    """dX = dY Y / X, where no factor is 0."""
    if _is_noop(g, axes):
        return dy
    return g.Div(g.Mul(dy, _kept(g, g.output(0), x, axes)), x)


def _is_noop(g: GradientBuilder, axes: str | None) -> bool:
    if not g.attribute("noop_with_empty_axes", 0) or g.attribute("axes"):
        return False
    known = g.known(axes)
    return not axes or (known is not None and known.size == 0)


def _axes(g: GradientBuilder, x: str, axes: str | None) -> list[int] | None:
    """The axes counted from 0; None where only a run tells."""
    if _is_noop(g, axes):
        return []
    given = g.attribute("axes")
    if given is None and axes:
        known = g.known(axes)
        if known is None:
            return None
        given = known.ravel().tolist()
    rank = g.rank(x)
    return sorted(int(axis) % rank for axis in given) if given else list(range(rank))


def _kept(g: GradientBuilder, y: str, x: str, axes: str | None) -> str:
    """A result with a dim of 1 in the place of every one that was reduced."""
    if g.attribute("keepdims", 1):
        return y
    known = _axes(g, x, axes)
    return g.Unsqueeze(y, axes) if known is None else g.unsqueeze(y, *known) if known else y
