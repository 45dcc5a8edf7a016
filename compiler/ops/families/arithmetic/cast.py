"""Casts: any dim may be sharded; a partial sum passes through where no partial value is rounded to an integer."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import FLOATING
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule

_SIGNED = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)
_LINEAR = "linear only to floating-point types, from these and signed integers"

cast = op("Cast", factors="*->*", linear="joint", remarks=_LINEAR, precision="follow", rising=True)
cast_like = op("CastLike", factors="*,_->*", linear="joint", partial=(0,), remarks=_LINEAR, precision="follow")


@cast.sharding
def _(node: ir.Node) -> Rule | None:
    to = ir.DataType(node.attributes.get_int("to", 0))
    return rule(node, "*->*", linear=None if _is_linear(node, to) else "")


@cast_like.sharding
def _(node: ir.Node) -> Rule | None:
    like = node.inputs[1]
    return rule(node, "*,_->*", linear=None if like is not None and _is_linear(node, like.dtype) else "")


@cast.gradient
@cast_like.gradient
def _(g: GradientBuilder, dy: str, x: str, like: str | None = None) -> str | None:
    """dX = dY in the type of X; nothing flows through integers."""
    if g.dtype(x) not in FLOATING or g.dtype(g.output(0)) not in FLOATING:
        return None
    return dy if g.dtype(x) == g.dtype(g.output(0)) else g.Cast(dy, to=g.dtype(x))


def _is_linear(node: ir.Node, to: ir.DataType | None) -> bool:
    value = node.inputs[0]
    return value is not None and value.dtype in (*FLOATING, *_SIGNED) and to in FLOATING
