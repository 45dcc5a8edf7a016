"""Ops that repeat elements: unchanged dims may be sharded, and so may dims of 1 along their repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.autodiff.shapes import like, numbers, once, vector
from partc.compiler.ops.local_shapes import as_int64, divided, integers, local_dims, shards_of
from partc.compiler.ops.node import LETTERS, Dim, constant_ints, dims, opset_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

expand = op("Expand", factors=".b,_->ab", linear="joint", partial=(0,), precision="follow", kernel="layout")


@expand.sharding
def _(node: ir.Node) -> Rule | None:
    source, target = dims(node.inputs[0]), dims(node.outputs[0])
    if source is None or target is None:
        return None
    if opset_of(node) < 10 and not all(isinstance(dim, int) for dim in target):
        return None
    ones: tuple[Dim, ...] = (1,) * (len(target) - len(source))
    return _repeated(ones + source, target, len(source), _local_shape)


@expand.gradient
def _(g: GradientBuilder, dy: str, x: str, shape: str) -> str:
    """dX = dY, summed where X was repeated, as of every operand that broadcasts."""
    return dy


tile = op(
    "Tile",
    factors=".b,_->ab",
    linear="joint",
    partial=(0,),
    remarks="dims above 1 that are repeated are replicated",
    precision="follow",
    kernel="layout",
)


@tile.sharding
def _(node: ir.Node) -> Rule | None:
    source, made = dims(node.inputs[0]), dims(node.outputs[0])
    return None if source is None or made is None else _repeated(source, made, len(source), _local_repeats)


@tile.gradient
def _(g: GradientBuilder, dy: str, x: str, repeats: str) -> str:
    """dX = the sum of dY over the repetitions, which are the major part of each dim."""
    times = numbers(g, repeats)
    if times is not None:
        return once(g, dy, x, times, major=True)
    rank = g.rank(x)
    pairs = g.Concat(g.unsqueeze(vector(g, repeats), 1), g.unsqueeze(g.shape_of(x), 1), axis=1)
    made = g.Reshape(dy, g.reshape(pairs, [-1]), allowzero=1)
    return like(g, g.sum(made, range(0, 2 * rank, 2)), x)


constant_of_shape = op("ConstantOfShape", factors="_->ab", stops_gradient=True)


@constant_of_shape.sharding
def _(node: ir.Node) -> Rule | None:
    made = dims(node.outputs[0])
    return None if made is None else Rule((WHOLE,), (LETTERS[: len(made)],))


def _repeated(source: Sequence[Dim], made: Sequence[Dim], rank: int, local: Callable[[Local], None]) -> Rule:
    """The rule by source dims aligned with the output's, of which the last `rank` are the operand's."""
    given, out = "", ""
    for letter, before, after in zip(LETTERS, source, made, strict=False):
        kept = same(before, after)
        given += letter if kept and before != 1 else WHOLE
        out += letter if kept or before == 1 else WHOLE
    return Rule((given[len(given) - rank :], WHOLE), (out,), local=local)


def _local_shape(local: Local) -> None:
    """Dims that the operand has need no extent; those along which it is repeated get the local one.

    A dynamic shape may be shorter than the output's: it is filled up with ones.
    """
    source, target = local.rule.inputs[0] or "", local.rule.outputs[0] or ""
    kept = "-" * (len(target) - len(source)) + source
    known = local_dims(local, local.outputs[0]) or (None,) * len(target)
    wanted = [1 if letter == here != WHOLE else dim for letter, here, dim in zip(target, kept, known, strict=True)]
    numbers = [dim for dim in wanted if isinstance(dim, int)]
    if len(numbers) == len(wanted):
        local.same([local.inputs[0], integers(local, "local_shape", numbers)])
        return
    ones = integers(local, "ones", [1] * len(target))
    longer = local.emit("Concat", [ones, as_int64(local, 1)], "longer", axis=0)
    begin, end = integers(local, "begin", [-len(target)]), integers(local, "end", [2**31 - 1])
    aligned = local.emit("Slice", [longer, begin, end], "aligned")
    local.same([local.inputs[0], divided(local, aligned, shards_of(local, target), round_up=True)])


def _local_repeats(local: Local) -> None:
    """Repeats of dims of 1 are divided where the output is sharded along them."""
    given, made = local.rule.inputs[0] or "", local.rule.outputs[0] or ""
    shards = [
        1 if here == letter else count for here, letter, count in zip(given, made, shards_of(local, made), strict=True)
    ]
    repeats = constant_ints(local.node, 1)
    if set(shards) == {1}:
        local.same()
    elif repeats is not None:
        numbers = [number // count for number, count in zip(repeats, shards, strict=True)]
        local.same([local.inputs[0], integers(local, "repeats", numbers)])
    else:
        local.same([local.inputs[0], divided(local, as_int64(local, 1), shards)])


@constant_of_shape.local
def _(local: Local) -> None:
    """The shape divided by the shards."""
    known = local_dims(local, local.outputs[0]) or (None,)
    numbers = [dim for dim in known if isinstance(dim, int)]
    if len(numbers) == len(known):
        local.same([integers(local, "local_shape", numbers)])
    else:
        local.same([divided(local, as_int64(local, 0), shards_of(local, local.rule.outputs[0]))])
