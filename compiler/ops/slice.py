"""Ops that take or leave a part along some axes: dims that they take as they are may be cut.

A Slice that takes a dim from its begin to its end does so on a piece too, since it is clamped to the dim's extent: it needs
no rewriting.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.join import but_axes
from partc.compiler.ops.operands import LETTERS, axes_of, axis_of, constant_ints, counted, dims, operand, rank_of, same
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.ops.table import op


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
