"""Casts: any dim may be sharded; a partial sum passes through where no partial value is rounded to an integer.

Quantization: elementwise; scales and zero points are sharded together with their axis.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import FLOATING, LETTERS, axis_of, dims, operand, rank_of, same
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

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


quantize = op("QuantizeLinear", factors="a,a,a->a", remarks="a scale of one number is replicated; blocks stay together")

dequantize = op(
    "DequantizeLinear",
    factors="a,a,a->a",
    linear="each",
    partial=(1,),
    remarks="a scale of one number is replicated; blocks stay together",
)
op("DynamicQuantizeLinear", why="its scale follows from the global extremes", rounds="sums")


@quantize.sharding
@dequantize.sharding
def _(node: ir.Node) -> Rule | None:
    source, scale = dims(node.inputs[0]), dims(operand(node, 1))
    if source is None or scale is None:
        return None
    letters = LETTERS[: len(source)]
    axis = axis_of(node, len(source), 1) if source else 0
    if not scale or scale == (1,):
        scales = WHOLE * len(scale)
    elif len(scale) == 1:
        scales = letters[axis]
    else:
        if len(scale) != len(source) or not all(
            same(a, b) for k, (a, b) in enumerate(zip(source, scale, strict=True)) if k != axis
        ):
            return None
        block, blocks, extent = node.attributes.get_int("block_size", 0), scale[axis], source[axis]
        if not (isinstance(blocks, int) and isinstance(extent, int) and blocks * block == extent):
            letters = letters[:axis] + WHOLE + letters[axis + 1 :]
        scales = letters
    point = operand(node, 2)
    points = () if len(node.inputs) < 3 else (None if point is None else scales if rank_of(point) else "",)
    return Rule((letters, scales, *points), (letters,))
