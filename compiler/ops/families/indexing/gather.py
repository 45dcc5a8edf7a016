"""Ops that look up elements: dims of the indices and of the data may be sharded, and so may the axis of the lookup.

A lookup in a table with sharded rows runs on every rank, with the rows of other ranks masked out; the result is the sum over the ranks. If
ids are sharded by the same axes, or the plan says `pull`, each rank asks the others for its rows (`lower/pulls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import added_along, extents, joined, like, vector
from partc.compiler.ir.graph import BY_EXPERT
from partc.compiler.ops.families.indexing.row_ranges import OLDEST_OPSET, look_up, masked, rows_of, spread, summable
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.local_shapes import as_int64, as_typed, integer
from partc.compiler.ops.node import LETTERS, axis_of, constant_ints, counted, dims, opset_of, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule
from partc.compiler.ops.work import Dims

ROW = "v"
"""The letter of the axis of a lookup."""


gather = op(
    "Gather",
    factors="avb,i->aib",
    contracted="v",
    linear="each",
    partial=(0,),
    remarks="rows of other ranks are masked",
    precision="follow",
    kernel="lookup",
)


@gather.sharding
def _(node: ir.Node) -> Rule | None:
    rank, count = rank_of(node.inputs[0]), rank_of(node.inputs[1])
    if rank is None or count is None:
        return None
    axis = axis_of(node, rank, 0)
    row = ROW if _contractible(node) else WHOLE
    free = [letter for letter in LETTERS if letter != ROW]
    before, after = "".join(free[:axis]), "".join(free[axis : rank - 1])
    indices = "".join(free[rank - 1 : rank - 1 + count])
    is_table = row == ROW and axis == 0 and all(isinstance(dim, int) and dim for dim in dims(node.inputs[0]) or ())
    return Rule(
        (before + row + after, indices),
        (before + indices + after,),
        reduce={ROW: "sum"} if row == ROW else {},
        looked_up=ROW if is_table else "",
    )


@gather.row
def _(node: ir.Node, inputs: Sequence[Dims]) -> Dims:
    """The dims after the axis."""
    return inputs[0][axis_of(node, len(inputs[0]), 0) + 1 :]


@gather.gradient
def _(g: GradientBuilder, dy: str, x: str, indices: str) -> str:
    """dX is zeros, with dY added at the indices."""
    axis = axis_of(g.node, g.rank(x), 0)
    return like(g, added_along(g, indices, dy, axis, x), x)


@gather.looks_up
def _(node: ir.Node) -> bool:
    return node.attributes.get_int("axis", 0) == 0


@gather.row_gradient
def _(g: GradientBuilder, dy: str, x: str, indices: str) -> tuple[str, str]:
    """dX is dY at the rows of the indices; an index that occurs twice has two rows. Negative ids are counted from the first row."""
    shape = g.static(x)
    if shape is None:
        raise NoGradient(f"the shape of the table {x!r} is not known")
    if g.rank(indices) == 1:
        flat, rows = vector(g, indices), dy
    else:
        flat, rows = g.reshape(vector(g, indices), [-1]), g.reshape(dy, [-1, *shape[1:]])
    return str(g.Where(g.Less(flat, g.constant(0)), g.Add(flat, g.constant(shape[0])), flat)), rows


gather_elements = op(
    "GatherElements",
    factors="av,ai->ai",
    contracted="v",
    linear="each",
    partial=(0,),
    remarks="rows of other ranks are masked; dims in which sizes differ are replicated",
    precision="follow",
    kernel="lookup",
)


@gather_elements.sharding
def _(node: ir.Node) -> Rule | None:
    data, indices = dims(node.inputs[0]), dims(node.inputs[1])
    if data is None or indices is None:
        return None
    axis = axis_of(node, len(data), 0)
    letters = [letter for letter in LETTERS if letter != ROW]
    shared = [letter if same(a, b) else WHOLE for letter, a, b in zip(letters, data, indices, strict=False)]
    read, written = list(shared), list(shared)
    read[axis], written[axis] = ROW if _contractible(node) else WHOLE, letters[axis]
    out = "".join(written)
    return Rule(
        ("".join(read), out),
        (out,),
        reduce={ROW: "sum"} if read[axis] == ROW else {},
    )


@gather_elements.gradient
def _(g: GradientBuilder, dy: str, x: str, indices: str) -> str:
    """dX is zeros, with dY added element by element."""
    made = g.ScatterElements(g.zeros(x), indices, dy, axis=axis_of(g.node, g.rank(x), 0), reduction="add")
    return like(g, str(made), x)


gather_nd = op(
    "GatherND",
    factors="bvwd,bi.->bid",
    contracted="vw",
    linear="each",
    partial=(0,),
    remarks="rows of other ranks are masked",
    precision="follow",
    kernel="lookup",
)


@gather_nd.sharding
def _(node: ir.Node) -> Rule | None:
    data, indices = dims(node.inputs[0]), dims(node.inputs[1])
    if data is None or indices is None or not isinstance(indices[-1], int):
        return None
    batch, depth = node.attributes.get_int("batch_dims", 0), indices[-1]
    letters = LETTERS[: len(data)]
    of_indices = LETTERS[len(data) : len(data) + len(indices) - 1 - batch]
    looked_up = letters[batch : batch + depth]
    contractible = _contractible(node)
    rows = looked_up if contractible else WHOLE * depth
    return Rule(
        (letters[:batch] + rows + letters[batch + depth :], letters[:batch] + of_indices + WHOLE),
        (letters[:batch] + of_indices + letters[batch + depth :],),
        reduce=dict.fromkeys(looked_up, "sum") if contractible else {},
    )


@gather_nd.row
def _(node: ir.Node, inputs: Sequence[Dims]) -> Dims:
    """The dims of the data after those that an index has a component for."""
    data, indices = inputs[:2]
    depth = indices[-1] if indices else 0
    return data[node.attributes.get_int("batch_dims", 0) + depth :] if isinstance(depth, int) else data


@gather_nd.gradient
def _(g: GradientBuilder, dy: str, x: str, indices: str) -> str:
    """dX is zeros, with dY added at the indices; each index is prefixed with the index of its batch."""
    places, batch = vector(g, indices), g.attribute("batch_dims", 0)
    if batch:
        rank = g.rank(indices)
        one_each = joined(g, extents(g, indices, range(rank - 1)), [1])
        counters = []
        for axis in range(batch):
            length = g.reshape(extents(g, indices, [axis]), [])
            counter = g.Range(g.constant(0), length, g.constant(1))
            aligned = g.reshape(counter, [1] * axis + [-1] + [1] * (rank - 1 - axis))
            counters.append(g.Expand(aligned, one_each))
        places = str(g.Concat(*counters, places, axis=-1))
    return like(g, str(g.ScatterND(g.zeros(x), places, dy, reduction="add")), x)


one_hot = op("OneHot", factors="i,_,_->iv", linear="each", partial=(2,), precision="follow", rounds="exact")


@one_hot.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    indices = "".join([letter for letter in LETTERS if letter != ROW][:rank])
    axis = axis_of(node, rank + 1, -1)
    row = ROW if opset_of(node) >= OLDEST_OPSET else WHOLE
    depth = WHOLE * (rank_of(node.inputs[1]) or 0)
    return Rule(
        (indices, depth, WHOLE),
        (indices[:axis] + row + indices[axis:],),
    )


@one_hot.gradient
def _(g: GradientBuilder, dy: str, indices: str, depth: str, values: str) -> tuple[None, None, str]:
    """dValues: the sum of dY at the hot places is last, the sum of the rest first."""
    marks = g.OneHot(indices, depth, g.constant([0.0, 1.0], values), axis=g.attribute("axis", -1))
    hot = g.ReduceSum(g.Mul(dy, marks), keepdims=0)
    cold = g.Sub(g.ReduceSum(dy, keepdims=0), hot)
    return None, None, like(g, str(g.Concat(g.unsqueeze(cold, 0), g.unsqueeze(hot, 0), axis=0)), values)


compress = op(
    "Compress",
    factors="a.,_->a.",
    linear="joint",
    partial=(0,),
    remarks="the axis is replicated, without axis everything",
    precision="follow",
    kernel="lookup",
)


@compress.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    if node.attributes.get_int("axis", None) is None:
        return Rule((WHOLE * rank, WHOLE), (WHOLE,))
    letters = but_axes(rank, (axis_of(node, rank, 0),))
    return Rule((letters, WHOLE), (letters,))


@compress.row
def _(node: ir.Node, inputs: Sequence[Dims]) -> Dims:
    """The dims after the axis; without an axis, single elements."""
    data = inputs[0]
    return () if "axis" not in node.attributes else data[axis_of(node, len(data), 0) + 1 :]


@compress.gradient
def _(g: GradientBuilder, dy: str, x: str, condition: str) -> str:
    """dX is zeros, with dY added at the places of the selected elements."""
    kept, axis = g.reshape(g.NonZero(condition), [-1]), g.attribute("axis")
    if axis is not None:
        return like(g, added_along(g, kept, dy, counted(axis, g.rank(x)), x), x)
    flat = g.ConstantOfShape(g.reshape(g.size_of(x), [1]), value=ir.tensor(np.zeros(1, g.dtype(x).numpy())))
    return like(g, str(g.Reshape(g.ScatterElements(flat, kept, dy), g.shape_of(x), allowzero=1)), x)


def _contractible(node: ir.Node) -> bool:
    data = node.inputs[0]
    return data is not None and summable(data.dtype) and opset_of(node) >= OLDEST_OPSET


def _dtype(local: Local) -> ir.DataType:
    data = local.node.inputs[0]
    assert data is not None
    assert data.dtype is not None
    return data.dtype


@gather.local
def _(local: Local) -> None:
    if local.num_shards(ROW) == 1 or BY_EXPERT in local.node.meta:
        local.same()
        return
    data, indices = local.rule.inputs[0] or "", local.rule.inputs[1] or ""
    axis = data.index(ROW)
    found = look_up(local, as_int64(local, 1), rows_of(local, 0, axis, ROW), ROW)
    rows = f"{local.outputs[0]}.found"
    local.same([local.inputs[0], found.safe], [rows])
    mask = spread(local, found.present, len(indices), len(data) - 1 - axis)
    masked(local, rows, mask, _dtype(local), local.outputs[0])


@gather_elements.local
def _(local: Local) -> None:
    if local.num_shards(ROW) == 1:
        local.same()
        return
    axis = (local.rule.inputs[0] or "").index(ROW)
    found = look_up(local, as_int64(local, 1), rows_of(local, 0, axis, ROW), ROW)
    rows = f"{local.outputs[0]}.found"
    local.same([local.inputs[0], found.safe], [rows])
    masked(local, rows, found.present, _dtype(local), local.outputs[0])


@gather_nd.local
def _(local: Local) -> None:
    """Index components of sharded dims are counted from the shard's begin; an element is on this rank if all its components are."""
    data, indices = local.rule.inputs[0] or "", local.rule.inputs[1] or ""
    batch = local.node.attributes.get_int("batch_dims", 0)
    depth = (dims(local.node.inputs[1]) or (0,))[-1]
    assert isinstance(depth, int)
    cut = [letter for letter in data[batch : batch + depth] if local.num_shards(letter) > 1]
    if not cut:
        local.same()
        return
    given = as_int64(local, 1)
    parts, present = [], ""
    for k, letter in enumerate(data[batch : batch + depth]):
        place = local.constant(f"place{k}", np.array([k], np.int64))
        part = local.emit("Gather", [given, place], f"part{k}", axis=len(indices) - 1)
        if letter in cut:
            found = look_up(local, part, rows_of(local, 0, batch + k, letter), letter)
            part = found.safe
            present = local.emit("And", [present, found.present], f"present{k}") if present else found.present
        parts.append(part)
    rows = f"{local.outputs[0]}.found"
    local.same([local.inputs[0], local.emit("Concat", parts, "indices", axis=len(indices) - 1)], [rows])
    trailing = len(data) - batch - depth
    shape = local.constant("mask.shape", np.array([0] * (len(indices) - 1) + [1] * trailing, np.int64))
    mask = local.emit("Reshape", [present, shape], "mask") if trailing != 1 else present
    masked(local, rows, mask, _dtype(local), local.outputs[0])


@one_hot.local
def _(local: Local) -> None:
    """The depth is this rank's; an index before its begin is moved beyond its end, so that it sets no element."""
    shards = local.num_shards(ROW)
    if shards == 1:
        local.same()
        return
    depth = constant_ints(local.node, 1)
    if depth is not None:
        total, here = integer(local, "depth", depth[0]), integer(local, "depth.here", depth[0] // shards)
    else:
        scalar = local.constant("scalar", np.array([], np.int64))
        total = local.emit("Reshape", [as_int64(local, 1), scalar], "depth")
        here = local.emit("Div", [total, integer(local, "shards", shards)], "depth.here")
    offset = local.emit("Mul", [here, integer(local, "shard", local.index(ROW))], "offset")
    zero, indices = integer(local, "zero", 0), as_int64(local, 0)
    from_end = local.emit("Less", [indices, zero], "from_end")
    counted = local.emit("Where", [from_end, local.emit("Add", [indices, total], "added"), indices], "counted")
    relative = local.emit("Sub", [counted, offset], "relative")
    before = local.emit("Less", [relative, zero], "before")
    within = local.emit("Where", [before, here, relative], "within")
    local.same([as_typed(local, 0, within), as_typed(local, 1, here), local.inputs[2]])
