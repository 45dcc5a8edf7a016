"""Maxima and minima over sharded dims, with their gradient: decomposed so that ranks reduce the extreme and the number of equal elements.

A rank that has a shard cannot tell from its own extreme whether it is the global one, nor how many elements share it. So a model that
trains on several ranks has the extreme in parts (`rewrite/gradient_forms.py`): the extreme itself and the number of elements that
equal it, which ranks reduce, and `partc.nn.Extreme(x, top, same, count) {axes}`, which is `top`. Its gradient is that of the whole op.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import LETTERS, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, WHOLE, Local, Rule

EXTREME = "Extreme"


extreme = op(
    EXTREME,
    domain=OWN,
    factors="ax,a.,ax,a.->a.",
    contracted={"x": ""},
    remarks="every rank has the global extreme",
)


@extreme.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0]) or 0
    axes = {axis % rank for axis in node.attributes.get_ints("axes") or ()} if rank else set()
    letters = LETTERS[:rank]
    kept = "".join(WHOLE if dim in axes else letter for dim, letter in enumerate(letters))
    contracted = {letters[axis]: "" for axis in sorted(axes)}
    return Rule((letters, kept, letters, kept), (kept,), reduce=contracted)


@extreme.local
def _(local: Local) -> None:
    local.give("Identity", [local.inputs[1]], local.outputs[0])


@extreme.gradient
def _(g: GradientBuilder, dy: str, x: str, top: str, same: str, count: str) -> str:
    """dX = dY where X is the extreme; equal ones share it."""
    return g.Mul(g.mask(same, x), g.Div(dy, count))


@extreme.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    top = node.inputs[1]
    assert top is not None
    ctx.set_shape_and_dtype(node.outputs[0], top.shape, top.dtype)
