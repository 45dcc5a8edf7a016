"""Ops that work on every element by itself, with broadcasting: any dim may be cut.

Sums pass terms of a sum on (`joint`), products those of one operand (`each`); whatever bends or rounds does not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.engine import GradientBuilder, gradient
from partc.compiler.ops.families.random import seeded
from partc.compiler.ops.node import operand
from partc.compiler.ops.notation import rule, whole_rule
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import Rule

_FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SIGNED = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)

op("Identity", "Neg", factors="*->*", linear="joint", says="sums pass")
op(
    *(
        "Abs",
        "Acos",
        "Acosh",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "BitwiseNot",
        "Ceil",
        "Celu",
        "Cos",
        "Cosh",
        "Elu",
        "Erf",
    ),
    *("Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Not"),
    *(
        "Reciprocal",
        "Relu",
        "Round",
        "Selu",
        "Shrink",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
        "Softplus",
        "Softsign",
        "Sqrt",
    ),
    *("Swish", "Tan", "Tanh", "ThresholdedRelu"),
    factors="*->*",
)
op("Add", "Sub", factors="*,*->*", linear="joint", says="sums pass together")
op("Mul", factors="*,*->*", linear="each", says="a sum passes in one operand")
op(
    *("And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Greater", "GreaterOrEqual", "Less"),
    *("LessOrEqual", "Mod", "Or", "PRelu", "Pow", "Xor"),
    factors="*,*->*",
)
op("Clip", factors="*,_,_->*")
op("Where", factors="*,*,*->*", linear="joint", terms=(1, 2), says="sums pass together in both choices")
op("Gelu", "QuickGelu", domain=CONTRIB, factors="*->*")
op("BiasGelu", "FastGelu", domain=CONTRIB, factors="*,*->*")


@op("Sum", "Mean")
def total(node: ir.Node) -> Rule | None:
    """`*,...->*`; sums pass together."""
    return _many(node, "joint")


@op("Max", "Min")
def extreme(node: ir.Node) -> Rule | None:
    """`*,...->*`."""
    return _many(node, "joint" if len(node.inputs) == 1 else "")


@op("Div")
def div(node: ir.Node) -> Rule | None:
    """`*,*->*`; a sum passes in the dividend, of floating-point numbers."""
    return rule(node, "*,*->*", linear="each" if _floating(operand(node, 0)) else "", terms=(0,))


@op("Cast")
def cast(node: ir.Node) -> Rule | None:
    """`*->*`; a sum passes to floating-point types from these and signed integers."""
    to = ir.DataType(node.attributes.get_int("to", 0))
    return rule(node, "*->*", linear="joint" if _signed(operand(node, 0)) and to in _FLOATING else "")


@op("CastLike")
def cast_like(node: ir.Node) -> Rule | None:
    """`*,_->*`; a sum passes as in Cast; the operand that gives the type stays whole."""
    linear = "joint" if _signed(operand(node, 0)) and _floating(operand(node, 1)) else ""
    return rule(node, "*,_->*", linear=linear, terms=(0,))


@op("Dropout")
def dropout(node: ir.Node) -> Rule | None:
    """`*,_,_->*,*`; a sum passes where no mask is made; whole where it draws random numbers, in training mode."""
    training = operand(node, 2)
    if training is not None:
        mode = ir.convenience.get_const_tensor(training)
        if mode is None or bool(mode.numpy()):
            return replace(whole_rule(node), local=seeded)
    return rule(node, "*,_,_->*,*", linear="joint" if len(node.outputs) == 1 else "", terms=(0,))


@gradient("Dropout")
def dropout_gradient(g: GradientBuilder, dy: str | None, *names: str | None) -> str | None:
    """dX = dY / (1 - ratio) where the mask has kept X; dY itself where nothing is dropped."""
    x, ratio, training = [*names[len(g.node.outputs) - 1 :], None, None][:3]
    mode = g.known(training)
    if not dy or not x or not training or (mode is not None and not mode.any()):
        return dy
    kept = g.mask(g.output(1), dy)
    known = g.known(ratio) if ratio else np.array(0.5)
    if known is not None:
        scale = g.constant(1 / (1 - float(known)), dy)
    else:
        scale = str(g.Reciprocal(g.Sub(g.constant(1, dy), g.Cast(ratio, to=g.dtype(dy)))))
    if mode is None:
        scale = str(g.Where(training, scale, g.constant(1, dy)))
    return str(g.Mul(g.Mul(dy, kept), scale))


def _many(node: ir.Node, linear: str) -> Rule | None:
    return rule(node, ",".join("*" * len(node.inputs)) + "->*", linear=linear)


def _floating(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in _FLOATING


def _signed(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in (*_FLOATING, *_SIGNED)
