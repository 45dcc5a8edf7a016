"""Ops of a local map, a part of the model that is written for one rank's shards: its borders and the collectives inside.

    Enter(x) {spec, axes, pieces}     the shard of a global value; `spec` has per dim the mesh axes that shard it, `pieces` their product
    Leave(y) {spec, axes, pieces}     the global value of shards; along an axis that does not shard it, it is the same
    AllReduce(x) {axis, size, ...}    and the other collectives, among the ranks that differ along the axis

Between the borders nodes are ordinary ones in local shapes: every rank runs them on what it has. So are cotangents: each rank's are its
own. A value that enters uncut has on every rank a term of its cotangent; one that leaves uncut takes terms. `size` and `pieces` are filled
in from the plan's mesh (`rewrite/local_maps.py`), all 1 on one rank, where every op here is an Identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ops.node import LETTERS, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, WHOLE, Local, Rule

ENTER, LEAVE, AXIS_INDEX = "Enter", "Leave", "AxisIndex"
LINE = "partc.line"
"""The metadata of its borders and collectives: the line of the model that says so."""
ALONG = "#"
"""The factor of a border that no operand has: axes of the map that do not shard the value."""


@dataclass(frozen=True)
class LocalCollective:
    """What a collective does with `dim` (and `to`): by how many ranks it divides the one and multiplies the other."""

    dual: str
    divides: bool = False
    multiplies: bool = False
    same: bool = False
    """Whether all ranks have the same result."""


SPREAD = "Spread"
"""What is the same on all ranks anyway, as each rank's own: nothing forwards, an AllReduce of the cotangents backwards."""
COLLECTIVES = {
    "AllReduce": LocalCollective("AllReduce", same=True),
    "AllGather": LocalCollective("ReduceScatter", multiplies=True, same=True),
    "ReduceScatter": LocalCollective("AllGather", divides=True),
    "AllToAll": LocalCollective("AllToAll", divides=True, multiplies=True),
    "Broadcast": LocalCollective("Reduce", same=True),
    "Reduce": LocalCollective("Broadcast"),
    "Gather": LocalCollective("Scatter", multiplies=True),
    "Scatter": LocalCollective("Gather", divides=True),
    "SendRecv": LocalCollective("SendRecv"),
    "Spread": LocalCollective("AllReduce", same=True),
}


def is_border(node: ir.Node) -> bool:
    """Whether values enter or leave a local map by a node."""
    return node.domain == OWN and node.op_type in (ENTER, LEAVE)


def is_collective(node: ir.Node) -> bool:
    """Whether a node is a collective of a local map."""
    return node.domain == OWN and node.op_type in COLLECTIVES


def specs(node: ir.Node) -> tuple[tuple[str, ...], ...]:
    """For each dim of a border's value the mesh axes that shard it, major first; () for an unsharded dim."""
    return tuple(tuple(filter(None, text.split(","))) for text in node.attributes.get_strings("spec") or ())


def dims_changed(node: ir.Node) -> tuple[int | None, int | None]:
    """The dims that a collective divides and multiplies."""
    law, rank = COLLECTIVES[node.op_type], rank_of(node.inputs[0]) or 1
    dim = node.attributes.get_int("dim", 0) % rank
    to = node.attributes.get_int("to", dim) % rank
    return dim if law.divides else None, to if law.multiplies else None


enter = op(ENTER, domain=OWN, factors="_->_", remarks="as its spec says; every rank has its shard")
leave = op(LEAVE, domain=OWN, factors="_->_", remarks="as its spec says; what is not sharded is the same")
collective = op(*COLLECTIVES, domain=OWN, factors="_->_", remarks="every rank has its own")
axis_index = op(AXIS_INDEX, domain=OWN, factors="->", remarks="the rank's place along the axis")


@enter.sharding
def _(node: ir.Node) -> Rule | None:
    letters, plain = _letters(node)
    return Rule((letters,), (plain,), reduce=dict.fromkeys([*letters.replace(WHOLE, ""), ALONG], ""))


@leave.sharding
def _(node: ir.Node) -> Rule | None:
    letters, plain = _letters(node)
    return Rule((plain,), (letters,), apart=frozenset({0}))


@collective.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    return Rule((None if rank is None else WHOLE * rank,), (None if rank is None else WHOLE * rank,))


@axis_index.sharding
def _(node: ir.Node) -> Rule | None:
    return Rule((), ("",), reduce={ALONG: ""})


@enter.local
@leave.local
@collective.local
def _(local: Local) -> None:
    local.give("Identity", [local.inputs[0]], local.outputs[0])


@axis_index.local
def _(local: Local) -> None:
    number = local.constant("place", np.array(local.index(ALONG), np.int64))
    local.give("Identity", [number], local.outputs[0])


def _letters(node: ir.Node) -> tuple[str, str]:
    spec = specs(node) or ((),) * (rank_of(node.inputs[0]) or 0)
    return "".join(LETTERS[dim] if axes else WHOLE for dim, axes in enumerate(spec)), WHOLE * len(spec)


def _border_shapes(times: bool) -> Callable[[ShapeInferenceContext, ir.Node], None]:
    def shapes(ctx: ShapeInferenceContext, node: ir.Node) -> None:
        x = node.inputs[0]
        assert x is not None
        pieces = node.attributes.get_ints("pieces") or (1,) * (rank_of(x) or 0)
        dims = None
        if x.shape is not None and len(x.shape) == len(pieces):
            dims = ir.Shape(
                [scaled(dim, n if times else 1, 1 if times else n) for dim, n in zip(x.shape, pieces, strict=True)]
            )
        ctx.set_shape_and_dtype(node.outputs[0], dims, x.dtype)

    return shapes


@collective.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    x, size = node.inputs[0], node.attributes.get_int("size", 1)
    assert x is not None
    if x.shape is None:
        ctx.set_shape_and_dtype(node.outputs[0], None, x.dtype)
        return
    divided, multiplied = dims_changed(node)
    dims = [
        scaled(dim, size if place == multiplied else 1, size if place == divided else 1)
        for place, dim in enumerate(x.shape)
    ]
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)


def scaled(dim: int | ir.SymbolicDim, times: int, by: int) -> int | ir.SymbolicDim:
    """The dim multiplied by `times` and divided by `by`."""
    if times == by:
        return dim
    if isinstance(dim, int):
        return dim * times // by
    return dim if dim.value is None else dim * times / by


@axis_index.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([]), ir.DataType.INT64)


enter.shapes(_border_shapes(False))
leave.shapes(_border_shapes(True))


def axes_named(node: ir.Node) -> tuple[str, ...]:
    """The mesh axes that a border or a collective names."""
    if is_border(node):
        return tuple(node.attributes.get_strings("axes") or ())
    return (node.attributes.get_string("axis", ""),)


def line_of(node: ir.Node) -> str:
    return node.metadata_props.get(LINE, "")
