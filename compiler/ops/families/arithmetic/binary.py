"""Ops of several tensors that work on every element by itself, with broadcasting: any dim may be sharded.

Sums let operands that are Partial pass (`joint`), products let one operand pass (`each`); whatever bends or rounds lets none pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import FLOATING
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule

op(
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    factors="*,*->*",
    stops_gradient=True,
    precision="widest",
)
op("And", "Or", "Xor", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", factors="*,*->*", stops_gradient=True)
modulo = op("Mod", factors="*,*->*", precision="widest")
add = op("Add", factors="*,*->*", linear="joint", precision="widest", rising=True)
subtract = op("Sub", factors="*,*->*", linear="joint", precision="widest")
multiply = op("Mul", factors="*,*->*", linear="each", precision="widest")
power = op("Pow", factors="*,*->*", kernel="function")
parametric_relu = op("PRelu", factors="*,*->*", precision="widest")
clip = op("Clip", factors="*,_,_->*", precision="widest", rounds="exact", rising=True)
where = op("Where", factors="*,*,*->*", linear="joint", partial=(1, 2), precision="widest", rounds="exact")
total = op("Sum", factors="*,...->*", linear="joint", precision="widest", rounds="sums", rising=True)
mean = op("Mean", factors="*,...->*", linear="joint", precision="widest", rounds="sums")
extreme = op(
    "Max",
    "Min",
    factors="*,...->*",
    linear="joint",
    remarks="linear only with one operand",
    precision="widest",
    rounds="exact",
    rising=True,
)
divide = op(
    "Div",
    factors="*,*->*",
    linear="each",
    partial=(0,),
    remarks="linear only in floating-point numbers",
    precision="widest",
    rounds="sums",
)


@add.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str, str]:
    """dA = dB = dY."""
    return dy, dy


@subtract.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str, str | None]:
    """dA = dY, dB = -dY."""
    return dy, g.Neg(dy) if g.wants(1) else None


@multiply.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str | None, str | None]:
    """dA = dY B, dB = dY A."""
    return g.Mul(dy, b) if g.wants(0) else None, g.Mul(dy, a) if g.wants(1) else None


@divide.sharding
def _(node: ir.Node) -> Rule | None:
    dividend = node.inputs[0]
    exact = dividend is not None and dividend.dtype in FLOATING
    return rule(node, "*,*->*", linear=None if exact else "")


@divide.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str, str | None]:
    """dA = dY / B, dB = -dA Y."""
    da = g.Div(dy, b)
    return da, g.Neg(g.Mul(da, g.output(0))) if g.wants(1) else None


@modulo.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str, str | None]:
    """dA = dY, dB = -dY (A - Y) / B, the quotient rounded to an integer."""
    quotient = g.Round(g.Div(g.Sub(a, g.output(0)), b)) if g.wants(1) else None
    return dy, quotient and g.Neg(g.Mul(dy, quotient))


@power.gradient
def _(g: GradientBuilder, dy: str, a: str, b: str) -> tuple[str | None, str | None]:
    """dA = dY B A^(B-1), and 0 where B is; dB = dY Y log A, and 0 where A is 0 and B is not negative."""
    da = db = None
    exponent = g.known(b)
    number = float(exponent.item()) if exponent is not None and exponent.size == 1 else None
    of_type = b if g.dtype(a) == g.dtype(b) or number is not None else g.Cast(b, to=g.dtype(a))
    if g.wants(0) and number is not None:
        if number == 0:
            da = g.zeros(a)
        elif number == 1:
            da = dy
        elif number == 2:
            da = g.Mul(dy, g.Add(a, a))
        else:
            da = g.Mul(g.Mul(dy, g.constant(number, a)), g.Pow(a, g.constant(number - 1, a)))
    elif g.wants(0):
        slope = g.Mul(of_type, g.Pow(a, g.Sub(of_type, g.constant(1, a))))
        da = g.Mul(dy, g.Where(g.Equal(of_type, g.constant(0, a)), g.constant(0, a), slope))
    if g.wants(1) and g.dtype(b) in FLOATING:
        zero, one = g.constant(0, a), g.constant(1, a)
        flat = g.And(g.Equal(a, zero), g.GreaterOrEqual(b, g.constant(0, b)))
        db = g.Mul(g.Mul(dy, g.output(0)), g.Log(g.Where(flat, one, a)))
        db = db if g.dtype(a) == g.dtype(b) else g.Cast(db, to=g.dtype(b))
    return da, db


@total.gradient
def _(g: GradientBuilder, dy: str, *terms: str) -> Sequence[str]:
    """dXi = dY."""
    return [dy] * len(terms)


@mean.gradient
def _(g: GradientBuilder, dy: str, *terms: str) -> Sequence[str]:
    """dXi = dY / n."""
    share = dy if len(terms) == 1 else g.Mul(dy, g.constant(1 / len(terms), dy))
    return [share] * len(terms)


@extreme.sharding
def _(node: ir.Node) -> Rule | None:
    return rule(node, "*,...->*", linear=None if len(node.inputs) == 1 else "")


@extreme.gradient
def _(g: GradientBuilder, dy: str, *operands: str) -> Sequence[str | None]:
    """dXi = dY where Xi is Y; operands that are equal there share it."""
    if len(operands) == 1:
        return [dy]
    chosen = [g.mask(g.Equal(one, g.output(0)), dy) for one in operands]
    share = g.Div(dy, g.Sum(*chosen))
    return [g.Mul(share, one) if g.wants(k) else None for k, one in enumerate(chosen)]


@clip.gradient
def _(g: GradientBuilder, dy: str, x: str, low: str | None = None, high: str | None = None) -> Sequence[str | None]:
    """dX = dY where X is within its bounds; elsewhere it is the bound's."""
    dx = g.Mul(dy, g.mask(g.Equal(x, g.output(0)), dy))
    dlow = g.Mul(dy, g.mask(g.Less(x, low), dy)) if low and g.wants(1) else None
    dhigh = g.Mul(dy, g.mask(g.Greater(x, high), dy)) if high and g.wants(2) else None
    return dx, dlow, dhigh


@where.gradient
def _(g: GradientBuilder, dy: str, condition: str, a: str, b: str) -> Sequence[str | None]:
    """dA = dY where the condition holds, dB = dY where it does not."""
    zero = g.constant(0, dy)
    da = g.Where(condition, dy, zero) if g.wants(1) else None
    return None, da, g.Where(condition, zero, dy) if g.wants(2) else None


@parametric_relu.gradient
def _(g: GradientBuilder, dy: str, x: str, slope: str) -> Sequence[str | None]:
    """dX = dY, times the slope left of 0; dS = dY X left of 0."""
    right, zero = g.Greater(x, g.constant(0, x)), g.constant(0, x)
    dx = g.Mul(dy, g.Where(right, g.constant(1, x), slope)) if g.wants(0) else None
    return dx, g.Mul(dy, g.Where(right, zero, x)) if g.wants(1) else None
