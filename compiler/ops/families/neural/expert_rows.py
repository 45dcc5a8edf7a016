"""The border ops of an expert layer on several ranks: rows go to the rank of their expert, and results come back.

    ToExperts(rows [m, h], experts [m])              -> rows' [m, h], experts' [m], places [m]
    FromExperts(y [m, h], places [m], experts [m])   -> y' [m, h]: the results in the order of the rows

On one rank both pass the rows through. If the experts are sharded (`e`), a rank's shard of the values between the borders (`r`) has the
rows of its own experts: their number is known only at run time, and is at most all rows of the ranks that share the experts. Expert numbers
are then counted from the rank's first expert. If these ranks have the same rows, each selects the rows of its experts, and its result, a
partial sum, has zeros in the other rows. If they have different rows, the rows are sent (`lower/routes.py`).

With `capacity`, two integers c = a/b, an expert takes the first ceil(c m / experts) of the m rows that a rank has for all of them. The
later ones are dropped: their results and their gradients are zeros.
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
    experts, capacity = as_int64(local, 1), capacity_of(local.node)
    if local.num_shards(EXPERT) == 1 and capacity is None:
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
    own = local.emit("And", [begun, below], "own")
    if capacity is not None:
        own = local.emit("And", [own, _within(local, experts, relative, each, capacity)], "kept")
    found = local.emit("NonZero", [own], "found")
    flat = local.constant("flat", np.array([-1], np.int64))
    local.give("Reshape", [found, flat], places)
    local.give("Gather", [rows, places], output)
    local.give("Gather", [relative, places], own_experts)


def _within(local: Local, experts: str, relative: str, each: int, capacity: tuple[int, int]) -> str:
    """Returns whether each row is among the first of its expert, of as many as an expert takes."""
    over, under = capacity[0], capacity[1] * local.node.attributes.get_int("experts", 0)
    scaled = local.emit("Mul", [local.emit("Size", [experts], "entries"), integer(local, "over", over)], "scaled")
    raised = local.emit("Add", [scaled, integer(local, "under_less_one", under - 1)], "raised")
    most = local.emit("Div", [raised, integer(local, "under", under)], "most")
    last = local.constant("last", np.array([1], np.int64))
    column = local.emit("Unsqueeze", [relative, last], "column")
    is_of = local.emit("Equal", [column, local.constant("each", np.arange(each))], "is_of")
    number = local.emit("Cast", [is_of], "number", to=ir.DataType.INT64.value)
    turns = local.emit("CumSum", [number, integer(local, "along", 0)], "turns")
    turn = local.emit("ReduceSum", [local.emit("Mul", [number, turns], "own_turns"), last], "turn", keepdims=0)
    return local.emit("LessOrEqual", [turn, most], "within")


@from_experts.local
def _(local: Local) -> None:
    """Scatters the results to the places of their rows, with zeros in the other rows."""
    rows, places, experts = local.inputs
    (output,) = local.outputs
    if local.num_shards(EXPERT) == 1 and capacity_of(local.node) is None:
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


def capacity_of(node: ir.Node) -> tuple[int, int] | None:
    """Returns the numerator and the denominator of a border's capacity, if rows may be dropped."""
    capacity = node.attributes.get_ints("capacity", ())
    return (capacity[0], capacity[1]) if capacity else None


@to_experts.gradient
def _(g: GradientBuilder, dy: str, unused: None, none: None, rows: str, experts: str) -> str:
    """dX is dY at the places of its rows, and zero in the other rows."""
    places = g.unsqueeze(g.output(2), -1)
    return str(g.ScatterND(g.zeros(rows), places, dy))


@from_experts.gradient
def _(g: GradientBuilder, dy: str, y: str, places: str, experts: str) -> str:
    """The gradient of the results is dY at the places of their rows."""
    return str(g.Gather(dy, places))
