"""Slice: dims that it takes whole may be sharded, and dims of which it takes every n-th element, in shards of whole runs of n.

A Slice that takes a dim from its begin to its end also does so on a shard, since it is clamped to the dim's extent: it needs no rewriting.
The same holds for one with steps, such as `x[1::2]` of two dims that an exporter has interleaved.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import all_pads, extents, like, numbers, vector
from partc.compiler.ops.node import LETTERS, constant_ints, counted, dims, operand, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

slice_ = op(
    "Slice",
    factors="a.,_,_,_,_->a.",
    linear="joint",
    partial=(0,),
    remarks="dims that are not taken from end to end are replicated; in steps of n, shards are whole runs of n",
    precision="follow",
    kernel="layout",
)


@slice_.sharding
def _(node: ir.Node) -> Rule | None:
    source, target = dims(node.inputs[0]), dims(node.outputs[0])
    if source is None or target is None:
        return None
    axes, steps = _sliced(node, len(source)), constant_ints(node, 4)
    if axes is None or (operand(node, 4) is not None and steps is None):
        return None
    starts, ends = constant_ints(node, 1), constant_ints(node, 2)
    letters, units = list(LETTERS[: len(source)]), dict[str, int]()
    for k, axis in enumerate(axes):
        size, step = source[axis], steps[k] if steps else 1
        if isinstance(size, int) and step > 1 and starts and ends and 0 <= starts[k] < step and ends[k] >= size:
            if size % step:
                letters[axis] = WHOLE
            else:
                units[letters[axis]] = size // step
        elif not same(size, target[axis]) or step != 1:
            letters[axis] = WHOLE
    text = "".join(letters)
    return Rule((text, *replicated_operands(node)), (text,), units=units)


@slice_.gradient
def _(
    g: GradientBuilder,
    dy: str,
    x: str,
    starts: str | None = None,
    ends: str | None = None,
    axes: str | None = None,
    steps: str | None = None,
) -> str:
    """dX is dY padded with zeros, and with zeros between its elements if steps are larger than 1."""
    begins, begin = numbers(g, starts, "starts"), starts and vector(g, starts)
    if begins is not None:
        begin = g.constant(np.array(begins, np.int64))
    assert begin
    sliced = numbers(g, axes, "axes")
    if sliced is None:
        count = g.static(begin)
        if axes or count is None:
            raise NoGradient("Slice along axes that are not constants has no gradient")
        sliced = tuple(range(count[0]))
    sliced = tuple(counted(axis, g.rank(x)) for axis in sliced)
    strides = numbers(g, steps) if steps else (1,) * len(sliced)
    if strides is not None and set(strides) <= {1}:
        return like(g, _padded(g, dy, x, sliced, begin), x)
    stride = vector(g, steps) if steps else ""
    for k, axis in enumerate(sliced):
        one = g.constant(np.array([k], np.int64))
        at, by = (_number(g, given, one) for given in (begin, stride))
        dy = _spread(g, dy, x, axis, at, by)
    return like(g, dy, x)


def _padded(g: GradientBuilder, dy: str, x: str, axes: tuple[int, ...], begin: str) -> str:
    """Pads `dy` with zeros: before it for the elements that the Slice skipped, after it up to the shape of `x`."""
    before, whole, kept = g.known(begin), g.shape(x), g.shape(dy)
    static = before is not None and whole is not None and kept is not None
    if static and before is not None and whole is not None and kept is not None:
        pads = np.zeros((2, len(whole)), np.int64)
        for axis, start in zip(axes, before.tolist(), strict=True):
            dim, length = whole[axis], kept[axis]
            if same(dim, length):
                continue
            if not isinstance(dim, int) or not isinstance(length, int):
                break
            first = min(max(start + dim if start < 0 else start, 0), dim)
            pads[:, axis] = first, dim - first - length
        else:
            return str(g.Pad(dy, g.constant(pads.ravel())))
    dims = extents(g, x, axes)
    first = _clamped(g, begin, dims, dims)
    after = g.Sub(g.Sub(dims, first), _lengths(g, dy, x, axes))
    return str(g.Pad(dy, all_pads(g, first, after, axes, g.rank(dy))))


def _spread(g: GradientBuilder, dy: str, x: str, axis: int, begin: str, step: str) -> str:
    """Spreads `dy` out along an axis: each place of `x` gets the element of `dy` that was taken from it, or the zero after the last one."""
    dim, length = (_number(g, one, g.constant([0])) for one in (extents(g, x, [axis]), _lengths(g, dy, x, (axis,))))
    zero, one = g.constant(0), g.constant(1)
    last = g.Sub(dim, g.Cast(g.Less(step, zero), to=ir.DataType.INT64))
    first = _clamped(g, begin, dim, last)
    counter = g.Range(zero, length, one)
    places = g.Add(first, g.Mul(counter, step))
    nowhere = g.Expand(length, g.reshape(dim, [1]))
    taken = g.ScatterElements(nowhere, places, counter, axis=0)
    pads = np.zeros((2, g.rank(dy)), np.int64)
    pads[1, axis] = 1
    return str(g.Gather(g.Pad(dy, g.constant(pads.ravel())), taken, axis=axis))


def _lengths(g: GradientBuilder, dy: str, x: str, axes: tuple[int, ...]) -> str:
    """The extents of `dy`: read at run time if those of `x` are dynamic, since the inferred end of a clamped slice may be wrong."""
    whole = g.shape(x) or ()
    if all(isinstance(whole[axis], int) for axis in axes):
        return extents(g, dy, axes)
    return str(g.Gather(g.Shape(dy), g.constant(np.array(axes, np.int64))))


def _number(g: GradientBuilder, of: str, place: str) -> str:
    """One of the numbers of a vector, as a scalar."""
    known, at = g.known(of), g.known(place)
    if known is not None and at is not None:
        return g.constant(int(known[at[0]]))
    return g.reshape(g.Gather(of, place), [])


def _clamped(g: GradientBuilder, begin: str, dims: str, last: str) -> str:
    """The starts, counted from 0 and clamped to the dims."""
    known, zero = g.known(begin), g.constant(0)
    if known is not None and (known >= 0).all():
        return begin if not known.any() else str(g.Min(begin, last))
    from_end = g.Where(g.Less(begin, zero), g.Add(begin, dims), begin)
    return str(g.Min(g.Max(from_end, zero), last))


def _sliced(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """The axes that a Slice names, in the order of its steps; None if they are dynamic."""
    given = node.attributes.get_ints("axes") or constant_ints(node, 3)
    if given is not None:
        return tuple(counted(axis, rank) for axis in given)
    if operand(node, 3) is not None:
        return None
    starts = node.attributes.get_ints("starts")
    begin = dims(operand(node, 1))
    count = len(starts) if starts is not None else begin[0] if begin else None
    return tuple(range(count)) if isinstance(count, int) else None


def replicated_operands(node: ir.Node) -> tuple[str | None, ...]:
    """The letters of all operands but the first: replicated, or None for an absent operand."""
    return tuple(None if value is None else WHOLE * (rank_of(value) or 0) for value in node.inputs[1:])
