"""Quantization: elementwise; scales and zero points are sharded together with their axis."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.node import LETTERS, axis_of, dims, operand, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

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
