"""Pad and crop: dims that are neither padded nor cropped may be sharded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import added_along, all_pads, extents, like, numbers, vector
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.families.shapes.slice import replicated_operands
from partc.compiler.ops.node import axes_of, constant_ints, counted, operand, rank_of
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

pad = op(
    "Pad",
    factors="a.,_,_,_->a.",
    linear="joint",
    partial=(0,),
    remarks="padded dims are replicated; linear only where the padding is zero or made of the data",
    precision="follow",
    kernel="layout",
)


@pad.sharding
def _(node: ir.Node) -> Rule | None:
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
    linear = None if not padded or _pads_linearly(node) else ""
    return Rule((letters, *replicated_operands(node)), (letters,), linear=linear)


@pad.gradient
def _(
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
        dx = like(g, str(g.Pad(dy, _cropping(g, widths, padded, rank))), x)
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


center_crop_pad = op(
    "CenterCropPad",
    factors="a.,_->a.",
    linear="joint",
    partial=(0,),
    remarks="the axes are replicated",
    precision="follow",
    kernel="layout",
)


@center_crop_pad.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None or node.attributes.get_ints("axes") is None:
        return None
    letters = but_axes(rank, axes_of(node, rank) or ())
    return Rule((letters, WHOLE), (letters,))


def _cropping(g: GradientBuilder, widths: str, axes: Sequence[int], rank: int) -> str:
    """The negative pads that crop what the pads of some axes add."""
    known, count = g.known(widths), len(axes)
    if known is not None:
        pads = np.zeros((2, rank), np.int64)
        pads[:, list(axes)] = -known.reshape(2, count)
        return g.constant(pads.ravel())
    taken = str(g.Neg(widths))
    if tuple(axes) == tuple(range(rank)):
        return taken
    before, after = (g.Gather(taken, g.constant(np.arange(k, k + count))) for k in (0, count))
    return all_pads(g, before, after, axes, rank)


def _pads_linearly(node: ir.Node) -> bool:
    """Whether the padding of a sum is the sum of paddings: not for a constant other than zero."""
    if node.attributes.get_string("mode", "constant") != "constant":
        return True
    value = operand(node, 2)
    if value is None:
        return node.attributes.get_float("value", 0.0) == 0.0
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not tensor.numpy().any()
