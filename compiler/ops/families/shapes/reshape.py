"""Ops that keep the elements and their order and change only how they are grouped into dims.

Input and output dims are matched in groups of equal products. A group of one dim on each side is that dim; in any other the
major-most dims share a letter, since a shard there is the same contiguous block of elements on both sides.

    (batch, 128, 512) -> (batch, 128, 8, 64)    abc->abc.
    (batch, 128, 512) -> (batch*128, 512)       a.b->ab
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import prod
from typing import Any

import onnx_ir as ir
import sympy
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.autodiff.shapes import shaped
from partc.compiler.ir.graph import COPIES_DIMS, has_computed_target
from partc.compiler.ops.local_shapes import as_int64, integer, integers, local_dims, shards_of
from partc.compiler.ops.node import LETTERS, Dim, axes_of, axis_of, constant_ints, counted, dims, operand, opset_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

reshape = op(
    "Reshape",
    factors="a,_->a",
    linear="joint",
    partial=(0,),
    remarks="dims are matched in groups of equal products, of which the major-most may be sharded",
    precision="follow",
    kernel="view",
)


@reshape.sharding
def _(node: ir.Node) -> Rule | None:
    source, target = dims(node.inputs[0]), dims(node.outputs[0])
    if source is None or target is None or len(node.inputs) < 2:
        return None
    if constant_ints(node, 1) is None and opset_of(node) < 9:
        return None
    letters = matched(source, target)
    return letters and Rule((letters[0], WHOLE), (letters[1],))


flatten = op(
    "Flatten",
    factors="a_b_->ab",
    linear="joint",
    remarks="the major-most dim of each side is sharded alike",
    precision="follow",
    kernel="view",
)


@flatten.sharding
def _(node: ir.Node) -> Rule | None:
    source = dims(node.inputs[0])
    if source is None:
        return None
    at = axis_of(node, len(source), 1)
    first, second = _major(source[:at], "a"), _major(source[at:], "b")
    made = ("a" if "a" in first else WHOLE) + ("b" if "b" in second else WHOLE)
    return Rule((first + second,), (made,))


squeeze = op("Squeeze", factors="a.b->ab", linear="joint", partial=(0,), precision="follow", kernel="view")


@squeeze.sharding
def _(node: ir.Node) -> Rule | None:
    source, target = dims(node.inputs[0]), dims(node.outputs[0])
    axes = axes_of(node, 0 if source is None else len(source))
    if source is None or axes is None:
        return None
    if not axes:
        axes = tuple(k for k, dim in enumerate(source) if dim == 1)
        if target is None or len(target) != len(source) - len(axes):
            return None
    letters = "".join(WHOLE if k in axes else LETTERS[k] for k in range(len(source)))
    local = None if node.attributes.get("axes") or operand(node, 1) else functools.partial(_named_axes, axes=axes)
    return Rule((letters, *_axes_operand(node)), (letters.replace(WHOLE, ""),), local=local)


unsqueeze = op("Unsqueeze", factors="ab->a.b", linear="joint", partial=(0,), precision="follow", kernel="view")


@unsqueeze.sharding
def _(node: ir.Node) -> Rule | None:
    source = dims(node.inputs[0])
    if source is None:
        return None
    given = node.attributes.get_ints("axes") or constant_ints(node, 1)
    if given is None:
        return None
    rank = len(source) + len(given)
    axes = {counted(axis, rank) for axis in given}
    letters = iter(LETTERS[: len(source)])
    made = "".join(WHOLE if k in axes else next(letters) for k in range(rank))
    return Rule((LETTERS[: len(source)], *_axes_operand(node)), (made,))


@reshape.gradient
@flatten.gradient
@squeeze.gradient
@unsqueeze.gradient
def _(g: GradientBuilder, dy: str, x: str, *_: str | None) -> str:
    """dX = dY in the shape of X."""
    return shaped(g, dy, x)


def _named_axes(local: Local, axes: Sequence[int]) -> None:
    """The axes that the global value loses are named, for a shard may have other dims of size 1."""
    local.same([local.inputs[0], integers(local, "axes", axes)])


def matched(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[str, str] | None:
    """The letters of both sides of a reshape; None where an extent is 0, so that nothing is known."""
    sides = tuple(tuple(dim if isinstance(dim, int) else dim.value for dim in side) for side in (source, target))
    return None if 0 in sides[0] or 0 in sides[1] else _matched(*sides)


@functools.lru_cache(maxsize=4096)
def _matched(source: tuple[int | str | None, ...], target: tuple[int | str | None, ...]) -> tuple[str, str]:
    letters = ([WHOLE] * len(source), [WHOLE] * len(target))
    for here, there in dim_groups(source, target):
        letters[0][here[0]] = letters[1][there[0]] = LETTERS[here[0]]
    return "".join(letters[0]), "".join(letters[1])


def dim_groups(
    source: Sequence[int | str | None], target: Sequence[int | str | None]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the least groups of dims, but for dims of 1, that have the same product on both sides of a reshape."""
    here, there = (tuple(k for k, dim in enumerate(side) if dim != 1) for side in (source, target))
    left, right = _products([source[k] for k in here]), _products([target[k] for k in there])
    ends = {product: q for q, product in enumerate(right, 1)}
    p = q = 0
    for k, product in enumerate(left, 1):
        closes = ends.get(product, 0) if k < len(left) else len(right)
        if closes <= q:
            continue
        yield here[p:k], there[q:closes]
        p, q = k, closes


def _products(side: Sequence[int | str | None]) -> list[sympy.Expr]:
    """The product of the first dim, of the first two, and so on; a dim of which nothing is known is equal to none."""
    import sympy

    product: Any = sympy.Integer(1)
    found = []
    for dim in side:
        product = sympy.expand(product * (sympy.Dummy() if dim is None else _expression(dim)))
        found.append(product)
    return found


def _expression(dim: int | str) -> Any:
    import sympy
    from partc.compiler.dims.reading import read

    found = sympy.Integer(dim) if isinstance(dim, int) else read(dim)
    return sympy.Dummy() if found is None else found


def _major(side: Sequence[Dim], letter: str) -> str:
    """The letters of dims that become one: the first that is not 1 has the letter."""
    found = [WHOLE] * len(side)
    for k, dim in enumerate(side):
        if dim != 1:
            found[k] = letter
            break
    return "".join(found)


def _axes_operand(node: ir.Node) -> tuple[str | None, ...]:
    """The letters of the operand that gives the axes, where there is one."""
    return () if len(node.inputs) < 2 else (None if node.inputs[1] is None else WHOLE,)


@reshape.local
def _(local: Local) -> None:
    """The target in local extents: a constant where one dim at most is dynamic, else the given one with its entries divided."""
    known = local_dims(local, local.outputs[0])
    if COPIES_DIMS in local.node.meta and known is not None and None not in known:
        entries, shards = constant_ints(local.node, 1), shards_of(local, local.rule.outputs[0])
        _reshape_of_any_size(local, shards, [dim or 0 for dim in known], entries)
    else:
        local.same([local.inputs[0], local_target(local)])


def local_target(local: Local) -> str:
    """Returns the target in local extents."""
    shards = shards_of(local, local.rule.outputs[0])
    known = local_dims(local, local.outputs[0])
    entries = constant_ints(local.node, 1)
    kept = "0" if not local.node.attributes.get_int("allowzero", 0) else ""
    if known is not None and known.count(None) <= 1:
        return integers(local, "target", [dim if isinstance(dim, int) else -1 for dim in known])
    if entries is not None and not (kept and _moved_zero(local, entries)):
        return integers(
            local, "target", [n if n <= 0 else n // count for n, count in zip(entries, shards, strict=True)]
        )
    return _divided_target(local, shards, zero_copies=bool(kept))


def _reshape_of_any_size(
    local: Local, shards: Sequence[int], known: Sequence[int], entries: Sequence[int] | None
) -> None:
    """A target that programs of other sizes have, too, so that they share the session: dims that stay are copied, -1 is kept, and where a
    computed target says others, it stays computed. `known`: the local dims of this program.
    """
    opened = [entries is not None and k < len(entries) and entries[k] == -1 for k in range(len(known))]
    copied, block = _staying(local, opened)
    if has_computed_target(local.node) and not copied and not all(opened[:block]):
        local.same([local.inputs[0], _divided_target(local, shards, zero_copies=True)])
        return
    numbers = [-1 if opened[k] else 0 if k < copied else dim for k, dim in enumerate(known)]
    local.same([local.inputs[0], integers(local, "target", numbers)], allowzero=None)


def _staying(local: Local, opened: Sequence[bool]) -> tuple[int, int]:
    """How many dims from the first one on are those of the input, by size and shards; and how many the first block of dims makes.

    Blocks are the least runs of dims that hold as many elements on both sides, from the last dim on, so that a size of 1 or sizes that are
    equal by chance decide nothing: (16, 1, 64) -> (16, 64) has the blocks (16, 1 | 16) and (64 | 64), as (1, 16, 64) -> (16, 64) has.
    A size of 1 that the target leaves open (`opened`), as one head of keys, is of the dim after it where the target has more dims.
    """
    sides = [local.global_shapes.get(name) or () for name in (local.inputs[0], local.outputs[0])]
    source, target = ([dim for dim in side if isinstance(dim, int)] for side in sides)
    if [len(source), len(target)] != [*map(len, sides)]:
        return 0, 0
    blocks = list[tuple[int, int]]()
    here, there = len(source), len(target)
    while here and there:
        if blocks and here < there and opened[there - 1] and target[there - 1] == 1:
            blocks[0], there = (blocks[0][0], blocks[0][1] + 1), there - 1
            continue
        first, second = here - 1, there - 1
        while (one := prod(source[first:here])) != (other := prod(target[second:there])) and (first or second):
            if (one < other and first) or not second:
                first -= 1
            else:
                second -= 1
        blocks.insert(0, (here - first, there - second))
        here, there = first, second
    if blocks and (here or there):
        blocks[0] = blocks[0][0] + here, blocks[0][1] + there
    shards = zip(*_paired(local), strict=False)
    pairs = zip(blocks, shards, strict=False)
    alone = sum(1 for _ in takewhile(lambda pair: pair[0] == (1, 1) and pair[1][0] == pair[1][1], pairs))
    return alone, blocks[0][1] if blocks else 0


def _moved_zero(local: Local, target: Sequence[int]) -> bool:
    """Whether an entry of 0, which copies the input's dim of that place, stands for a dim that is sharded otherwise."""
    return any(n == 0 for n, here, there in zip(target, *_paired(local), strict=False) if here != there)


def _paired(local: Local) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return shards_of(local, local.rule.inputs[0]), shards_of(local, local.rule.outputs[0])


def _divided_target(local: Local, shards: Sequence[int], zero_copies: bool) -> str:
    """The target with its positive entries divided; an entry of 0 that copies a dim sharded otherwise is filled in first."""
    zero = integer(local, "zero", 0)
    target = as_int64(local, 1)
    here, there = _paired(local)
    shared = min(len(here), len(there))
    if zero_copies and here[:shared] != there[:shared]:
        shape = local.emit("Shape", [local.inputs[0]], "given_shape")
        extents = local.emit("Mul", [shape, integers(local, "given", here)], "whole")
        room = local.emit("Concat", [extents, integers(local, "room", [1] * len(there))], "extended", axis=0)
        copied = local.emit("Gather", [room, integers(local, "places", range(len(there)))], "copied")
        target = local.emit("Where", [local.emit("Equal", [target, zero], "copies"), copied, target], "filled")
    cut = local.emit("Div", [target, integers(local, "shards", shards)], "cut")
    return local.emit("Where", [local.emit("Greater", [target, zero], "given_extents"), cut, target], "target")
