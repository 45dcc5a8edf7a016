"""Ops that write elements: dims that are not indexed are free; updates that are summed may be sharded over ranks.

Along a sharded dim of the data, a rank writes the rows that it has; the others go into one more row, which is cut off again. With a
reduction of max or min, updates sharded over ranks leave results that await the same; with a sum, the data are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import like
from partc.compiler.ops.families.indexing.row_ranges import OLDEST_OPSET, RowRange, look_up, rows_of, summable
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.local_shapes import as_int64, integers
from partc.compiler.ops.node import LETTERS, axis_of, dims, operand, opset_of, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule
from partc.compiler.ops.work import Dims

ROW = "v"
"""The letter of a dim of the data that indices reach."""
_REDUCTIONS = {"add": "sum", "max": "max", "min": "min"}


_REMARKS = "i contracted only where updates are added up or compared; linear unless they are compared, in input 0 alone if multiplied"

scatter_elements = op(
    "ScatterElements",
    factors="av,ai,ai->av",
    contracted="i",
    linear="joint",
    partial=(0, 2),
    remarks=_REMARKS,
    precision="follow",
    kernel="scatter",
)
scatter = op(
    "Scatter",
    factors="av,ai,ai->av",
    contracted="i",
    linear="joint",
    partial=(0, 2),
    remarks=_REMARKS,
    precision="follow",
    kernel="scatter",
)


@scatter_elements.sharding
@scatter.sharding
def _(node: ir.Node) -> Rule | None:
    data, indices = dims(node.inputs[0]), dims(node.inputs[1])
    if data is None or indices is None:
        return None
    axis = axis_of(node, len(data), 0)
    letters = [letter for letter in LETTERS if letter not in (ROW, "i")]
    shared = [letter if same(a, b) else WHOLE for letter, a, b in zip(letters, data, indices, strict=False)]
    written = list(shared)
    shared[axis] = ROW if _splits_rows(node) else WHOLE
    reduce, (linear, partial) = _reduction(node), _linear(node)
    written[axis] = "i" if reduce else WHOLE
    kept = "".join(shared)
    return Rule(
        (kept, "".join(written), "".join(written)),
        (kept,),
        reduce={"i": reduce} if reduce else {},
        linear=linear,
        partial=partial,
        local=_local_scatter,
    )


@scatter_elements.gradient
def _(g: GradientBuilder, dy: str, x: str, indices: str, updates: str) -> tuple[str | None, None, str | None]:
    """dX = dY, without what was replaced; dUpdates = dY where they were written.

    Of max and min what equals the result has the gradient; equal ones share it.
    """
    axis = axis_of(g.node, g.rank(x), 0)
    if g.attribute("reduction", "none") in ("max", "min"):
        y = g.output(0)
        kept = g.mask(g.Equal(x, y), x)
        won = g.mask(g.Equal(updates, g.GatherElements(y, indices, axis=axis)), x)
        share = g.Div(dy, g.ScatterElements(kept, indices, won, axis=axis, reduction="add"))
        of_updates = g.Mul(won, g.GatherElements(share, indices, axis=axis)) if g.wants(2) else None
        return g.Mul(kept, share) if g.wants(0) else None, None, of_updates
    replaces = _replaces(g)
    data = of_updates = None
    if g.wants(0):
        data = str(g.ScatterElements(dy, indices, g.zeros(updates), axis=axis)) if replaces else dy
    if g.wants(2):
        of_updates = str(g.GatherElements(dy, indices, axis=axis))
    return data, None, of_updates


scatter_nd = op(
    "ScatterND",
    factors="vb,i.,ib->vb",
    contracted="i",
    linear="joint",
    partial=(0, 2),
    remarks=_REMARKS,
    precision="follow",
    kernel="scatter",
)


@scatter_nd.sharding
def _(node: ir.Node) -> Rule | None:
    data, indices = dims(node.inputs[0]), dims(node.inputs[1])
    if data is None or indices is None or not isinstance(indices[-1], int):
        return None
    depth, count = indices[-1], len(indices) - 1
    free = [letter for letter in LETTERS if letter != ROW]
    kept = "".join(free[: len(data) - depth])
    reduce, (linear, partial) = _reduction(node), _linear(node)
    written = "".join(free[len(kept) : len(kept) + count]) if reduce else WHOLE * count
    row = ROW if depth and _splits_rows(node) else WHOLE * min(depth, 1)
    reached = row + WHOLE * (depth - 1) + kept
    return Rule(
        (reached, written + WHOLE, written + kept),
        (reached,),
        reduce=dict.fromkeys(written, reduce) if reduce else {},
        linear=linear,
        partial=partial,
        local=_local_scatter,
    )


@scatter_nd.row
def _(node: ir.Node, inputs: Sequence[Dims]) -> Dims:
    """What is behind the dims that an index has a component for; all of what has fewer dims, as flat memory has."""
    data, indices = inputs[:2]
    depth = indices[-1] if indices else 0
    return data[depth:] if isinstance(depth, int) and depth <= len(data) else data


@scatter_nd.gradient
def _(g: GradientBuilder, dy: str, x: str, indices: str, updates: str) -> tuple[str | None, None, str | None]:
    """As that of ScatterElements."""
    if g.attribute("reduction", "none") in ("max", "min"):
        y = g.output(0)
        kept = g.mask(g.Equal(x, y), x)
        won = g.mask(g.Equal(updates, like(g, str(g.GatherND(y, indices)), updates)), x)
        share = g.Div(dy, g.ScatterND(kept, indices, won, reduction="add"))
        taken = g.Mul(won, like(g, str(g.GatherND(share, indices)), updates)) if g.wants(2) else None
        return g.Mul(kept, share) if g.wants(0) else None, None, taken
    data = made = None
    if g.wants(0):
        data = str(g.ScatterND(dy, indices, g.zeros(updates))) if _replaces(g) else dy
    if g.wants(2):
        made = like(g, str(g.GatherND(dy, indices)), updates)
    return data, None, made


tensor_scatter = op(
    "TensorScatter",
    factors="b.d,b.d,b->b.d",
    linear="joint",
    partial=(0, 1),
    remarks="the axis is replicated",
    precision="follow",
    rounds="exact",
    kernel="scatter",
)


@tensor_scatter.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    letters = but_axes(rank, (axis_of(node, rank, -2),))
    places = () if len(node.inputs) < 3 else (None if operand(node, 2) is None else letters[0],)
    return Rule((letters, letters, *places), (letters,))


@tensor_scatter.row
def _(node: ir.Node, inputs: Sequence[Dims]) -> Dims:
    """Returns the dims after the axis."""
    return inputs[0][axis_of(node, len(inputs[0]), -2) + 1 :]


def _replaces(g: GradientBuilder) -> bool:
    """Whether updates replace elements, or else are added to them."""
    reduction = g.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise NoGradient(f"{g.node.op_type} with reduction {reduction!r} has no gradient")
    return bool(reduction == "none")


def _reduction(node: ir.Node) -> str:
    """The pending reduction of results of parts of the updates; empty where the last update wins or all are multiplied."""
    if not _typed(node):
        return ""
    return _REDUCTIONS.get(node.attributes.get_string("reduction", "none"), "")


def _linear(node: ir.Node) -> tuple[str, tuple[int, ...]]:
    """Elements are replaced or added up, or the data are multiplied by the updates."""
    match node.attributes.get_string("reduction", "none"):
        case "none" | "add":
            return "joint", (0, 2)
        case "mul":
            return "each", (0,)
        case _:
            return "", ()


def _splits_rows(node: ir.Node) -> bool:
    return _typed(node) and opset_of(node) >= max(OLDEST_OPSET, 10)


def _typed(node: ir.Node) -> bool:
    return node.inputs[0] is not None and summable(node.inputs[0].dtype)


def _local_scatter(local: Local) -> None:
    """Scatters into the local rows plus a dump row for foreign indices; only one rank keeps `data`, the others zeros."""
    data, indices = local.inputs[0], local.inputs[1]
    data = _counted_once(local, data)
    if local.num_shards(ROW) == 1:
        local.same([data, indices, local.inputs[2]])
        return
    axis = (local.rule.inputs[0] or "").index(ROW)
    rows = rows_of(local, 0, axis, ROW)
    places = as_int64(local, 1)
    if local.node.op_type == "ScatterND":
        places = _first_component(local, places, len(local.rule.inputs[1] or ""), rows)
    else:
        found = look_up(local, places, rows, ROW)
        places = local.emit("Where", [found.present, found.relative, rows.here], "places")
    one_more = local.emit("Gather", [data, integers(local, "first", [0])], "row", axis=axis)
    longer = local.emit("Concat", [data, one_more], "longer", axis=axis)
    written = f"{local.outputs[0]}.written"
    local.same([longer, places, local.inputs[2]], [written])
    begin, end = integers(local, "begin", [0]), integers(local, "end", [-1])
    local.give("Slice", [written, begin, end, integers(local, "axes", [axis])], local.outputs[0])


def _first_component(local: Local, indices: str, rank: int, rows: RowRange) -> str:
    """Indices of several components whose first is counted from the shard's begin."""
    depth = (dims(local.node.inputs[1]) or (0,))[-1]
    assert isinstance(depth, int)
    first = local.emit("Gather", [indices, integers(local, "place", [0])], "part", axis=rank - 1)
    found = look_up(local, first, rows, ROW)
    placed = local.emit("Where", [found.present, found.relative, rows.here], "placed")
    if depth == 1:
        return placed
    rest = local.emit("Gather", [indices, integers(local, "places", range(1, depth))], "rest", axis=rank - 1)
    return local.emit("Concat", [placed, rest], "indices", axis=rank - 1)


def _counted_once(local: Local, data: str) -> str:
    """The data on the first rank of a sum over updates, zeros on the others."""
    cut = [letter for letter, reduce in local.rule.reduce.items() if reduce == "sum" and local.num_shards(letter) > 1]
    if not cut:
        return data
    dtype = local.node.inputs[0].dtype if local.node.inputs[0] is not None else None
    assert dtype is not None
    first = all(local.index(letter) == 0 for letter in cut)
    keeps = local.constant("keeps", np.array(first))
    return local.emit("Where", [keeps, data, local.constant("nothing", np.zeros((), dtype.numpy()))], "once")
