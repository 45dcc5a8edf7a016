"""Ops that compute numbers from extents: the shape of a sharded tensor is the global one, and a rank takes its shard of a range.

What counts elements or is small is on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from partc.compiler.ops.local_shapes import integer, integers, shard_of, shards_of
from partc.compiler.ops.node import LETTERS, counted, opset_of, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

shape = op(
    "Shape",
    factors="ab->_",
    remarks="the global extents, on every rank",
    stops_gradient=True,
    precision="follow",
    kernel="view",
)


@shape.sharding
def _(node: ir.Node) -> Rule | None:
    return _extents(node, WHOLE, _global_shape)


size = op(
    "Size",
    factors="ab->",
    remarks="the global size, on every rank",
    stops_gradient=True,
    precision="follow",
    kernel="view",
)


@size.sharding
def _(node: ir.Node) -> Rule | None:
    return _extents(node, "", _global_size)


range_ = op("Range", factors=",,->n", remarks="every rank takes its shard")


@range_.sharding
def _(node: ir.Node) -> Rule | None:
    if opset_of(node) < 10:
        return None
    scalars = tuple(WHOLE * (rank_of(value) or 0) for value in node.inputs)
    return Rule(scalars, ("n",))


op("Unique", why="how many distinct elements there are needs all of them", kernel="sort")
op(
    "NonZero",
    why="how many elements there are, and where they stand, needs all of them",
    stops_gradient=True,
    precision="follow",
)


op("EyeLike", why="where the diagonal crosses a shard differs by rank", stops_gradient=True)


op(
    "HannWindow",
    "HammingWindow",
    "BlackmanWindow",
    "MelWeightMatrix",
    why="small, and made of scalars",
    stops_gradient=True,
)


op("Constant", why="known to every rank", stops_gradient=True, kernel="view")


def _extents(node: ir.Node, made: str, local: Callable[[Local], None]) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    letters = LETTERS[:rank]
    return Rule((letters,), (made,), reduce=dict.fromkeys(letters, ""), local=local)


def _global_shape(local: Local) -> None:
    shards = shards_of(local, local.rule.inputs[0])
    rank = len(shards)
    begin = counted(local.node.attributes.get_int("start", 0), rank)
    end = counted(local.node.attributes.get_int("end", rank), rank)
    taken = shards[max(begin, 0) : max(end, 0)]
    if all(count == 1 for count in taken):
        local.same()
        return
    here = f"{local.outputs[0]}.local"
    local.same(outputs=[here])
    local.give("Mul", [here, integers(local, "shards", taken)], local.outputs[0])


def _global_size(local: Local) -> None:
    here = f"{local.outputs[0]}.local"
    local.same(outputs=[here])
    count = integer(local, "shards", math.prod(shards_of(local, local.rule.inputs[0])))
    local.give("Mul", [here, count], local.outputs[0])


@range_.local
def _(local: Local) -> None:
    """The whole range, which is short, and of it this rank's shard, so that its numbers are the global ones."""
    if local.num_shards("n") == 1:
        local.same()
        return
    all_of_it = f"{local.outputs[0]}.whole"
    local.same(outputs=[all_of_it])
    shard_of(local, all_of_it, 0, "n", local.outputs[0])
