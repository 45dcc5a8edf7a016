"""The border ops of an expert layer on several ranks: rows go to the rank of their expert, and results come back.

    ToExperts(rows [m, h], experts [m])              -> rows' [m, h], experts' [m], places [m]
    FromExperts(y [m, h], places [m], experts [m])   -> y' [m, h]: the results in the order of the rows

On one rank both pass the rows through. If the experts are sharded (`e`), a rank's shard of the values between the borders (`r`) has the
rows of its own experts: their number is known only at run time, and is at most all rows of the ranks that share the experts. Expert numbers
are then counted from the rank's first expert. If these ranks have the same rows, each selects the rows of its experts, and its result, a
partial sum, has zeros in the other rows. If they have different rows, the rows are sent (`lower/routes.py`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.local_shapes import as_int64, integer
from partc.compiler.ops.node import rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, WHOLE, Local, Rule

TO_EXPERTS, FROM_EXPERTS = "ToExperts", "FromExperts"
EXPERT, ROW = "e", "r"

to_experts = op(
    TO_EXPERTS,
    domain=OWN,
    factors="m.,m->r.,r,r",
    contracted={"m": ""},
    remarks="rows of own experts; with rows of other ranks by a Route",
    precision="follow",
    kernel="lookup",
)
from_experts = op(
    FROM_EXPERTS,
    domain=OWN,
    factors="r.,r,m->m.",
    contracted={ROW: ""},
    linear="each",
    partial=(0,),
    remarks="zeros in rows of other ranks' experts; with rows of other ranks by a Return",
    precision="follow",
    kernel="lookup",
)


@to_experts.sharding
def _(node: ir.Node) -> Rule:
    row = WHOLE * ((rank_of(node.inputs[0]) or 2) - 1)
    return Rule(("m" + row, "m"), (ROW + row, ROW, ROW), reduce={"m": ""}, looked_up=EXPERT, dealt=ROW)


@from_experts.sharding
def _(node: ir.Node) -> Rule:
    row, reduce = WHOLE * ((rank_of(node.inputs[0]) or 2) - 1), {ROW: "", EXPERT: "sum"}
    return Rule((ROW + row, ROW, "m"), ("m" + row,), reduce=reduce, looked_up=EXPERT, dealt=ROW)


@to_experts.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    rows, experts = node.inputs
    assert rows is not None
    assert experts is not None
    for out, like in zip(node.outputs, (rows, experts, experts), strict=True):
        ctx.set_shape_and_dtype(out, like.shape, ir.DataType.INT64 if like is experts else rows.dtype)


@from_experts.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    rows, experts = node.inputs[0], node.inputs[2]
    assert rows is not None
    if rows.shape is not None and experts is not None and experts.shape is not None:
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([*experts.shape.dims, *rows.shape.dims[1:]]), rows.dtype)


@to_experts.local
def _(local: Local) -> None:
    """Selects the rows whose expert is one of the rank's, in their order."""
    rows, output, own_experts, places = local.inputs[0], *local.outputs
    experts = as_int64(local, 1)
    if local.num_shards(EXPERT) == 1:
        local.give("Identity", [rows], output)
        local.give("Identity", [experts], own_experts)
        zero, one = integer(local, "zero", 0), integer(local, "one", 1)
        count = local.emit("Size", [experts], "count")
        local.give("Range", [zero, count, one], places)
        return
    each = local.node.attributes.get_int("experts", 0) // local.num_shards(EXPERT)
    first = integer(local, "first", local.index(EXPERT) * each)
    relative = local.emit("Sub", [experts, first], "relative")
    begun = local.emit("GreaterOrEqual", [relative, integer(local, "zero", 0)], "begun")
    below = local.emit("Less", [relative, integer(local, "end", each)], "below")
    found = local.emit("NonZero", [local.emit("And", [begun, below], "own")], "found")
    flat = local.constant("flat", np.array([-1], np.int64))
    local.give("Reshape", [found, flat], places)
    local.give("Gather", [rows, places], output)
    local.give("Gather", [relative, places], own_experts)


@from_experts.local
def _(local: Local) -> None:
    """Scatters the results to the places of their rows, with zeros in the other rows."""
    rows, places, experts = local.inputs
    (output,) = local.outputs
    if local.num_shards(EXPERT) == 1:
        local.give("Identity", [rows], output)
        return
    value = local.node.inputs[0]
    assert value is not None
    assert value.dtype is not None
    row = local.constant("row", np.array(list(value.shape or ())[1:], np.int64))
    count = local.emit("Shape", [experts], "count")
    shape = local.emit("Concat", [count, row], "shape", axis=0)
    zeros = local.emit("ConstantOfShape", [shape], "zeros", value=ir.tensor(np.zeros(1, value.dtype.numpy())))
    last = local.constant("last", np.array([-1], np.int64))
    at = local.emit("Unsqueeze", [places, last], "at")
    local.give("ScatterND", [zeros, at, rows], output)


@to_experts.gradient
def _(g: GradientBuilder, dy: str, unused: None, none: None, rows: str, experts: str) -> str:
    """dX is dY at the places of its rows, and zero in the other rows."""
    places = g.unsqueeze(g.output(2), -1)
    return str(g.ScatterND(g.zeros(rows), places, dy))


@from_experts.gradient
def _(g: GradientBuilder, dy: str, y: str, places: str, experts: str) -> str:
    """The gradient of the results is dY at the places of their rows."""
    return str(g.Gather(dy, places))
