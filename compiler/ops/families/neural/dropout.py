"""Dropout: the standard's, and the one that trains, whose mask is a function of an element's position in the global tensor.

The standard's op draws its mask in the order of the global tensor, so that only the mode that drops nothing can be sharded.
`partc.nn.Dropout` draws from a seed, the number of the step, and the element's place. So the masks of a model are the same on one rank and
on many, however a tensor is sharded, and those of a step that is run again are those that it had. `partc.nn.Dropout(x, step) {ratio, seed}`
is not an op that a runtime knows: on every rank it becomes plain ones. `Dropout(x, step, part) {ratio, seed, parts, records_dim}` draws the
masks of one of several parts of a batch: what a rank has of a whole batch is `parts` shards like its own, one behind the other.

The dims are parted in two, rows and columns, and each part gives every place of its own a number: a Weyl sequence begun by seed and step,
mixed modulo 2**32 by two rounds of a shift, an exclusive or and a product. Numbers of rows are even, those of columns odd. An element is
kept where (row + column)**2 is below the share to be kept. The square is needed: of sums alone the fourth corner of every rectangle follows
from the other three. Squares of odd numbers meet all residues of 1 modulo 8 equally often, so the share is exact to 2**-29. Only the sum,
the square, the comparison and what is done with the mask are passes over the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ir.value_info import Shape
from partc.compiler.ops.families.arithmetic.random import seeded
from partc.compiler.ops.local_shapes import integer, integers, local_dims
from partc.compiler.ops.node import operand, rank_of
from partc.compiler.ops.notation import replicated_rule, rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, Local, Rule

DROPOUT = "Dropout"
PARTS, RECORDS_DIM = "parts", "records_dim"
"""Attributes of a dropout that runs on a part of a batch at a time: how many parts there are, and along which dim records lie."""
_UINT32 = ir.DataType.UINT32.value
_WEYL = 0x9E3779B1
"""2**32 over the golden ratio: multiples of it stay as far apart as numbers can."""
_STEP = {"rows": 0x85EBCA77, "columns": 0xC2B2AE3D}
_ROUNDS = ((2**16, 0x7FEB352D), (2**15, 2 * 0x046CA68B))
"""For each round the right shift and the factor; the last round leaves an even number."""
_SIZE_OF_A_SYMBOL = 64

dropout = op(
    "Dropout",
    factors="*,_,_->*,*",
    linear="joint",
    partial=(0,),
    draws=True,
    remarks="replicated in training mode, which draws random numbers; linear only where no mask is made",
    precision="follow",
    rounds="exact",
)


@dropout.sharding
def _(node: ir.Node) -> Rule | None:
    training = operand(node, 2)
    if training is not None:
        mode = ir.convenience.get_const_tensor(training)
        if mode is None or bool(mode.numpy()):
            return replace(replicated_rule(node), local=seeded)
    return rule(node, "*,_,_->*,*", linear=None if len(node.outputs) == 1 else "")


@dropout.gradient
def _(g: GradientBuilder, dy: str | None, *names: str | None) -> str | None:
    """dX = dY / (1 - ratio) where the mask has kept X; dY itself where nothing is dropped."""
    x, ratio, training = [*names[len(g.node.outputs) - 1 :], None, None][:3]
    mode = g.known(training)
    if not dy or not x or not training or (mode is not None and not mode.any()):
        return dy
    kept = g.mask(g.output(1), dy)
    known = g.known(ratio) if ratio else np.array(0.5)
    if known is not None:
        scale = g.constant(1 / (1 - float(known)), dy)
    else:
        scale = str(g.Reciprocal(g.Sub(g.constant(1, dy), g.Cast(ratio, to=g.dtype(dy)))))
    if mode is None:
        scale = str(g.Where(training, scale, g.constant(1, dy)))
    return str(g.Mul(g.Mul(dy, kept), scale))


placed_dropout = op(
    DROPOUT,
    domain=OWN,
    factors="*,_,_->*,*",
    linear="joint",
    partial=(0,),
    remarks="masks follow from global places; linear only where the mask is not an output",
)


@placed_dropout.sharding
def _(node: ir.Node) -> Rule | None:
    if rank_of(node.inputs[0]) is None:
        return replicated_rule(node)
    return rule(node, "*,_,_->*,*", linear=None if len(node.outputs) == 1 else "")


@placed_dropout.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    x = node.inputs[0]
    assert x is not None
    for out, dtype in zip(node.outputs, (x.dtype, ir.DataType.BOOL), strict=False):
        ctx.set_shape_and_dtype(out, x.shape, dtype)


@placed_dropout.local
def _(local: Local) -> None:
    """y = x m, m being 1 / (1 - ratio) where the element is kept and 0 elsewhere."""
    node, x = local.node, local.inputs[0]
    assert node.inputs[0] is not None
    dtype = node.inputs[0].dtype or ir.DataType.FLOAT
    ratio, seed = node.attributes.get_float("ratio", 0.5), node.attributes.get_int("seed", 0)
    rank = rank_of(node.inputs[0])
    sizes = local_dims(local, x) or (None,) * (1 if rank is None else rank)
    at = _parted(local.global_shapes.get(x) or ("?",) * len(sizes))
    shape = ""
    if any(size is None for size in sizes):
        shape = local.emit("Shape", [x], "extents")
    extents = shape if rank is not None else local.emit("Size", [x], "size")
    step = local.emit("Cast", [local.inputs[1]], "step", to=_UINT32)
    rows = _noise(local, "rows", range(at), sizes, extents, step, seed & 0xFFFFFFFF)
    columns = _noise(local, "columns", range(at, len(sizes)), sizes, extents, step, seed >> 32)
    odd = local.emit("Add", [columns, _number(local, "one", 1)], "columns.odd")
    both = local.emit("Add", [rows, odd], "both")
    drawn = local.emit("Mul", [both, both], "drawn")
    if shape:
        drawn = local.emit("Reshape", [drawn, shape], "aligned", allowzero=1)
        # Says that nothing broadcasts where dims are dynamic; else the gradient would have to find out.
        dims = local.local_shapes.get(x)
        local.nodes[-1].outputs[0].shape = None if dims is None else ir.Shape(dims)
    share = _number(local, "share", min(round((1 - ratio) * 2**32), 2**32 - 1))
    given = local.outputs[1] if local.outputs[1:] and local.outputs[1] else f"{local.outputs[0]}.kept"
    kept = local.give("Less", [drawn, share], given)
    mask = local.emit("Cast", [kept], "mask", to=dtype.value)
    scale = local.constant("scale", np.array(1 / (1 - ratio), dtype.numpy()))
    scaled = local.emit("Mul", [mask, scale], "scaled")
    local.give("Mul", [x, scaled], local.outputs[0])


def _parted(shape: Shape) -> int:
    """The number of leading dims that count as rows, chosen to minimize rows plus columns, whatever the sharding.

    The first dim counts as a symbol, so that a batch of a fixed size has the masks of a dynamic one.
    """
    sizes = [dim if isinstance(dim, int) and k else _SIZE_OF_A_SYMBOL for k, dim in enumerate(shape)]
    return min(range(len(sizes) + 1), key=lambda k: math.prod(sizes[:k]) + math.prod(sizes[k:]))


def _noise(
    local: Local, part: str, dims: Sequence[int], sizes: Sequence[int | None], extents: str, step: str, seed: int
) -> str:
    """A number below 2**32 for every place along some dims, even ones alone; as many dims follow as do in the global tensor."""
    often = local.emit("Mul", [step, _number(local, f"{part}.often", _STEP[part])], f"{part}.steps")
    noise = local.emit("Add", [often, _number(local, f"{part}.seed", seed)], f"{part}.key")
    for dim in dims:
        place = _places(local, dim, sizes[dim], extents)
        times = pow(_WEYL, dims[-1] - dim + 1, 2**32)
        place = local.emit("Mul", [place, _number(local, f"d{dim}.weyl", times)], f"d{dim}.weighed")
        behind = len(sizes) - 1 - dim
        if behind:
            axes = integers(local, f"d{dim}.axes", range(1, behind + 1))
            place = local.emit("Unsqueeze", [place, axes], f"d{dim}.aligned")
        noise = local.emit("Add", [place, noise], f"{part}.{dim}")
    for k, (shift, factor) in enumerate(_ROUNDS):
        high = local.emit("Div", [noise, _number(local, f"{part}.shift{k}", shift)], f"{part}.high{k}")
        folded = local.emit("BitwiseXor", [noise, high], f"{part}.folded{k}")
        noise = local.emit("Mul", [folded, _number(local, f"{part}.factor{k}", factor)], f"{part}.mixed{k}")
    return noise


def _places(local: Local, dim: int, size: int | None, extents: str) -> str:
    """The global places of this rank's elements along a dim."""
    letters = local.rule.inputs[0]
    letter = letters[dim] if letters else ""
    index = local.index(letter) if local.num_shards(letter) > 1 else 0
    step = integer(local, f"d{dim}.next", 1)
    if dim == local.node.attributes.get_int(RECORDS_DIM, -1):
        if local.pieces != local.num_shards(letter):
            length = _length(local, dim, size, extents)
            return _dealt_places(local, dim, index, local.num_shards(letter), length)
        begin, limit = _microbatch_span(local, dim, index, size, extents)
    elif size is not None:
        begin = integer(local, f"d{dim}.begin", index * size)
        limit = integer(local, f"d{dim}.limit", (index + 1) * size)
    else:
        length = extents
        if local.node.inputs[0] is not None and rank_of(local.node.inputs[0]) is not None:
            length = local.emit("Gather", [extents, integer(local, f"d{dim}.dim", dim)], f"d{dim}.size", axis=0)
        begin = integer(local, f"d{dim}.begin", 0)
        limit = length
        if local.num_shards(letter) > 1:
            begin = local.emit("Mul", [length, integer(local, f"d{dim}.index", index)], f"d{dim}.first")
            limit = local.emit("Add", [begin, length], f"d{dim}.last")
    places = local.emit("Range", [begin, limit, step], f"d{dim}.places")
    return local.emit("Cast", [places], f"d{dim}.numbers", to=_UINT32)


def _microbatch_span(local: Local, dim: int, index: int, size: int | None, extents: str) -> tuple[str, str]:
    """Begin and end of this rank's records of a part among those of the whole batch."""
    parts = local.node.attributes.get_int(PARTS, 1)
    length = _length(local, dim, size, extents)
    before = local.emit("Add", [local.inputs[2], integer(local, f"d{dim}.first", index * parts)], f"d{dim}.before")
    begin = local.emit("Mul", [before, length], f"d{dim}.begin")
    return begin, local.emit("Add", [begin, length], f"d{dim}.limit")


def _length(local: Local, dim: int, size: int | None, extents: str) -> str:
    if size is not None:
        return integer(local, f"d{dim}.length", size)
    return local.emit("Gather", [extents, integer(local, f"d{dim}.dim", dim)], f"d{dim}.size", axis=0)


def _dealt_places(local: Local, dim: int, index: int, shards: int, length: str) -> str:
    """The places among the whole batch of this rank's records of a part, which has a share of every piece of the batch.

    With q records of each piece, the r-th of part k is at r + k q + (r / q) (parts - 1) q.
    """
    parts = local.node.attributes.get_int(PARTS, 1)
    part = local.emit("Mul", [length, integer(local, f"d{dim}.shards", shards)], f"d{dim}.part")
    share = local.emit("Div", [part, integer(local, f"d{dim}.pieces", local.pieces)], f"d{dim}.share")
    begin = local.emit("Mul", [length, integer(local, f"d{dim}.index", index)], f"d{dim}.begin")
    limit = local.emit("Add", [begin, length], f"d{dim}.limit")
    own = local.emit("Range", [begin, limit, integer(local, f"d{dim}.next", 1)], f"d{dim}.own")
    before = local.emit("Mul", [local.inputs[2], share], f"d{dim}.before")
    others = local.emit("Mul", [share, integer(local, f"d{dim}.times", parts - 1)], f"d{dim}.others")
    between = local.emit("Mul", [local.emit("Div", [own, share], f"d{dim}.piece"), others], f"d{dim}.between")
    skipped = local.emit("Add", [before, between], f"d{dim}.skipped")
    places = local.emit("Add", [own, skipped], f"d{dim}.places")
    return local.emit("Cast", [places], f"d{dim}.numbers", to=_UINT32)


def _number(local: Local, name: str, number: int) -> str:
    return local.constant(name, np.array(number, np.uint32))
