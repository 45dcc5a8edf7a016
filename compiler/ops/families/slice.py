"""Ops that take or leave a part along some axes: dims that they take as they are may be cut.

A Slice that takes a dim from its begin to its end does so on a shard too, since it is clamped to the dim's extent: it needs
no rewriting.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.engine import GradientBuilder, NoGradient, gradient
from partc.compiler.autodiff.shapes import added_along, extents, like, numbers, vector
from partc.compiler.ops.families.join import but_axes
from partc.compiler.ops.node import LETTERS, axes_of, axis_of, constant_ints, counted, dims, operand, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule


@op("Slice")
def slice_(node: ir.Node) -> Rule | None:
    """`a.,_,_,_,_->a.`; dims that are not taken entirely, in steps of 1, whole; a sum passes."""
    source, made = dims(node.inputs[0]), dims(node.outputs[0])
    if source is None or made is None:
        return None
    axes, steps = _sliced(node, len(source)), constant_ints(node, 4)
    if axes is None or (operand(node, 4) is not None and steps is None):
        return None
    letters = list(LETTERS[: len(source)])
    for k, axis in enumerate(axes):
        if not same(source[axis], made[axis]) or (steps and steps[k] != 1):
            letters[axis] = WHOLE
    text = "".join(letters)
    return Rule((text, *_whole_operands(node, 1)), (text,), linear="joint", terms=(0,))


@op("Pad")
def pad(node: ir.Node) -> Rule | None:
    """`a.,_,_,_->a.`; padded dims whole; a sum passes where the padding is zero or made of the data."""
    rank = rank_of(node.inputs[0])
    pads = node.attributes.get_ints("pads") or constant_ints(node, 1)
    if rank is None or pads is None:
        return None
    axes = tuple(range(rank))
    if operand(node, 3) is not None:
        given = constant_ints(node, 3)
        if given is None:
            return None
        axes = tuple(counted(axis, rank) for axis in given)
    padded = tuple(axis for k, axis in enumerate(axes) if pads[k] or pads[k + len(axes)])
    letters = but_axes(rank, padded)
    linear = "joint" if not padded or _pads_linearly(node) else ""
    return Rule((letters, *_whole_operands(node, 1)), (letters,), linear=linear, terms=(0,))


@op("CenterCropPad")
def center_crop_pad(node: ir.Node) -> Rule | None:
    """`a.,_->a.`; the axes whole; a sum passes."""
    rank = rank_of(node.inputs[0])
    if rank is None or node.attributes.get_ints("axes") is None:
        return None
    letters = but_axes(rank, axes_of(node, rank) or ())
    return Rule((letters, WHOLE), (letters,), linear="joint", terms=(0,))


@op("Compress")
def compress(node: ir.Node) -> Rule | None:
    """`a.,_->a.`; the axis whole, without axis everything; a sum passes."""
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    if node.attributes.get_int("axis", None) is None:
        return Rule((WHOLE * rank, WHOLE), (WHOLE,), linear="joint", terms=(0,))
    letters = but_axes(rank, (axis_of(node, rank, 0),))
    return Rule((letters, WHOLE), (letters,), linear="joint", terms=(0,))


@op("ReverseSequence")
def reverse_sequence(node: ir.Node) -> Rule | None:
    """`bt,b->bt`; the time axis whole; a sum passes."""
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    letters = but_axes(rank, (axis_of(node, rank, 0, "time_axis"),))
    batch = letters[axis_of(node, rank, 1, "batch_axis")]
    return Rule((letters, batch), (letters,), linear="joint", terms=(0,))


@gradient("Compress")
def compress_gradient(g: GradientBuilder, dy: str, x: str, condition: str) -> str:
    """dX = zeros to which dY is added where it was kept."""
    kept, axis = g.reshape(g.NonZero(condition), [-1]), g.attribute("axis")
    if axis is not None:
        return like(g, added_along(g, kept, dy, counted(axis, g.rank(x)), x), x)
    flat = g.ConstantOfShape(g.reshape(g.size_of(x), [1]), value=ir.tensor(np.zeros(1, g.dtype(x).numpy())))
    return like(g, str(g.Reshape(g.ScatterElements(flat, kept, dy), g.shape_of(x), allowzero=1)), x)


@gradient("ReverseSequence")
def reverse_sequence_gradient(g: GradientBuilder, dy: str, x: str, lengths: str) -> str:
    """dX = dY reversed once more."""
    axes = {name: g.attribute(name) for name in ("batch_axis", "time_axis") if name in g.node.attributes}
    return str(g.ReverseSequence(dy, lengths, **axes))


@gradient("Slice")
def slice_gradient(
    g: GradientBuilder,
    dy: str,
    x: str,
    starts: str | None = None,
    ends: str | None = None,
    axes: str | None = None,
    steps: str | None = None,
) -> str:
    """dX = dY with zeros around it, and between its elements where steps were larger than 1."""
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
    """`dy` with as many zeros before it as were left out there, and after it what is missing to the dims of `x`."""
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
    return str(g.Pad(dy, g.Concat(first, after, axis=0), "", g.constant(np.array(axes, np.int64))))


def _spread(g: GradientBuilder, dy: str, x: str, axis: int, begin: str, step: str) -> str:
    """`dy` spread out along an axis: each place of `x` takes the element made of it, or the row of zeros after the last."""
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
    """The extents of `dy`: read from it where those of `x` are dynamic, since what is inferred of a clamped end may be wrong."""
    whole = g.shape(x) or ()
    if all(isinstance(whole[axis], int) for axis in axes):
        return extents(g, dy, axes)
    return str(g.Gather(g.Shape(dy), g.constant(np.array(axes, np.int64))))


def _number(g: GradientBuilder, of: str, place: str) -> str:
    """One of the numbers of a vector, without dims."""
    known, at = g.known(of), g.known(place)
    if known is not None and at is not None:
        return g.constant(int(known[at[0]]))
    return g.reshape(g.Gather(of, place), [])


def _clamped(g: GradientBuilder, begin: str, dims: str, last: str) -> str:
    """Starts counted from 0, within the dims."""
    known, zero = g.known(begin), g.constant(0)
    if known is not None and (known >= 0).all():
        return begin if not known.any() else str(g.Min(begin, last))
    from_end = g.Where(g.Less(begin, zero), g.Add(begin, dims), begin)
    return str(g.Min(g.Max(from_end, zero), last))


@gradient("Pad")
def pad_gradient(
    g: GradientBuilder, dy: str, x: str, pads: str | None = None, value: str | None = None, axes: str | None = None
) -> str | tuple[str, None, str]:
    """dX = dY cut to what X was, or, where padding repeats X, added up where it was taken; dValue = the rest of dY."""
    rank, mode = g.rank(x), g.attribute("mode", "constant")
    given = numbers(g, axes)
    if axes and given is None:
        raise NoGradient("Pad along axes that are not constants has no gradient")
    padded = tuple(counted(axis, rank) for axis in given) if given is not None else tuple(range(rank))
    known = numbers(g, pads, "pads")
    widths = g.constant(np.array(known, np.int64)) if known is not None else vector(g, str(pads))
    if mode == "constant":
        dx = like(g, str(g.Pad(dy, _negated(g, widths), "", g.constant(np.array(padded, np.int64)))), x)
        if not value or not g.wants(2):
            return dx
        rest = g.Sub(g.ReduceSum(dy, keepdims=0), g.ReduceSum(dx, keepdims=0))
        return dx, None, str(g.Reshape(rest, g.shape_of(value)))
    for k, axis in reversed(tuple(enumerate(padded))):
        if known is not None and not known[k] and not known[k + len(padded)]:
            continue
        places = g.constant(np.array([k, k + len(padded)], np.int64))
        rows = extents(g, x, [axis])
        counter = g.Range(g.constant(0), g.reshape(rows, []), g.constant(1))
        taken = g.Pad(counter, g.Gather(widths, places), mode=mode)
        dy = added_along(g, str(taken), dy, axis, x)
    return like(g, dy, x)


def _negated(g: GradientBuilder, widths: str) -> str:
    known = g.known(widths)
    return str(g.Neg(widths)) if known is None else g.constant(-known)


def _sliced(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """The axes that a Slice names, in the order of its steps; None where they are dynamic."""
    given = node.attributes.get_ints("axes") or constant_ints(node, 3)
    if given is not None:
        return tuple(counted(axis, rank) for axis in given)
    if operand(node, 3) is not None:
        return None
    starts = node.attributes.get_ints("starts")
    begin = dims(operand(node, 1))
    count = len(starts) if starts is not None else begin[0] if begin else None
    return tuple(range(count)) if isinstance(count, int) else None


def _pads_linearly(node: ir.Node) -> bool:
    """Whether the padding of a sum is the sum of paddings: not for a constant other than zero."""
    if node.attributes.get_string("mode", "constant") != "constant":
        return True
    value = operand(node, 2)
    if value is None:
        return node.attributes.get_float("value", 0.0) == 0.0
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not tensor.numpy().any()


def _whole_operands(node: ir.Node, begin: int) -> tuple[str | None, ...]:
    """Letters of the operands from `begin` on: whole where they are there."""
    return tuple(None if value is None else WHOLE * (rank_of(value) or 0) for value in node.inputs[begin:])
