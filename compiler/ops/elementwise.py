"""Ops that work on every element by itself, with broadcasting: any dim may be cut.

Sums pass terms of a sum on (`joint`), products those of one operand (`each`); whatever bends or rounds does not.
"""

from __future__ import annotations

import onnx_ir as ir

from partc.compiler.ops.factors import rule
from partc.compiler.ops.operands import operand
from partc.compiler.ops.rule import Rule
from partc.compiler.ops.table import CONTRIB, op

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
    return _many(node, "")


@op("Div")
def div(node: ir.Node) -> Rule | None:
    """`*,*->*`; a sum passes in the dividend, of floating-point numbers."""
    return rule(node, "*,*->*", linear="each" if _floating(operand(node, 0)) else "", terms=(0,))


@op("Cast")
def cast(node: ir.Node) -> Rule | None:
    """`*->*`; a sum passes between floating-point types."""
    to = ir.DataType(node.attributes.get_int("to", 0))
    return rule(node, "*->*", linear="joint" if _floating(operand(node, 0)) and _is_floating(to) else "")


@op("CastLike")
def cast_like(node: ir.Node) -> Rule | None:
    """`*,_->*`; a sum passes between floating-point types; the operand that gives the type stays whole."""
    linear = "joint" if _floating(operand(node, 0)) and _floating(operand(node, 1)) else ""
    return rule(node, "*,_->*", linear=linear, terms=(0,))


@op("Dropout")
def dropout(node: ir.Node) -> Rule | None:
    """`*,_,_->*,*`; whole where it draws random numbers, in training mode."""
    training = operand(node, 2)
    if training is not None:
        mode = ir.convenience.get_const_tensor(training)
        if mode is None or bool(mode.numpy()):
            return None
    return rule(node, "*,_,_->*,*")


def _many(node: ir.Node, linear: str) -> Rule | None:
    return rule(node, ",".join("*" * len(node.inputs)) + "->*", linear=linear)


def _floating(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and _is_floating(value.dtype)


def _is_floating(dtype: ir.DataType) -> bool:
    return dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
