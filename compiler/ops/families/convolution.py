"""Convolutions: images and channels are free, a cut of the channels that are summed leaves a sum, groups are cut whole.

Along a spatial dim neighbouring windows overlap, and so it stays whole, but where every window lies in its own stretch of the
input: a kernel no larger than its stride, no padding, and an input that the stride divides. Then shards have whole windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from partc.compiler.ops.families.bias import add_once, bias_once
from partc.compiler.ops.local import Local
from partc.compiler.ops.node import Dim, dims, operand
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

SPATIAL = "hwdefgijk"


@op("Conv")
def conv(node: ir.Node) -> Rule | None:
    """`nc_,oc_,o->no_`; c contracted; groups are cut whole; windows that do not overlap are free; the bias is added once."""
    return _convolution(node, "oc", transposed=False)


@op("ConvTranspose")
def conv_transpose(node: ir.Node) -> Rule | None:
    """`nc_,co_,o->no_`; c contracted; groups are cut whole; windows that do not overlap are free; the bias is added once."""
    return _convolution(node, "co", transposed=True)


@op("ConvInteger")
def conv_integer(node: ir.Node) -> Rule | None:
    """`nc_,oc_,_,o->no_`; c contracted; groups are cut whole; one zero point for all stays whole."""
    point = _per_channel(operand(node, 3))
    group = node.attributes.get_int("group", 1)
    if group > 1:
        return rule(node, f"ng_,g_,_,{point.replace('o', 'g')}->ng_", units={"g": group}, local=fewer_groups)
    spatial = windows(node, _kernel(node))
    return rule(node, f"nc{spatial},oc_,_,{point}->no{spatial}")


@op("QLinearConv")
def qlinear_conv(node: ir.Node) -> Rule | None:
    """`nc_,_,_,oc_,o,o,_,_,o->no_`; c whole; groups are cut whole."""
    scale, point = (_per_channel(operand(node, k)) for k in (4, 5))
    group = node.attributes.get_int("group", 1)
    if group > 1:
        parts = f"ng_,_,_,g_,{scale},{point},_,_,g->ng_".replace("o", "g")
        return rule(node, parts, units={"g": group}, local=fewer_groups)
    return rule(node, f"nc_,_,_,oc_,{scale},{point},_,_,o->no_", whole="c")


@op("DeformConv")
def deform_conv(node: ir.Node) -> Rule | None:
    """`nc_,oc_,n_,o,n_->no_`; c contracted; whole channels where there are groups; the bias is added once."""
    linear = "" if operand(node, 3) is not None else "each"
    if node.attributes.get_int("group", 1) > 1:
        return rule(node, "n._,.._,n_,.,n_->n._", linear=linear, terms=(0, 1, 4))
    whole = "c" if node.attributes.get_int("offset_group", 1) > 1 else ""
    local = None if operand(node, 3) is None else deform_bias_once
    return rule(node, "nc_,oc_,n_,o,n_->no_", whole=whole, linear=linear, terms=(0, 1, 4), local=local)


def fewer_groups(local: Local) -> None:
    """The node with as many groups as this rank has."""
    local.same(group=local.node.attributes.get_int("group", 1) // local.cut("g"))


def deform_bias_once(local: Local) -> None:
    """Adds the bias, operand 3 of DeformConv, to one term alone."""
    add_once(local, 3)


def windows(node: ir.Node, kernel: Sequence[int] | None, *, transposed: bool = False) -> str:
    """The letters of the spatial dims of input 0: one where windows do not overlap and shards hold whole ones, else `.`."""
    shape = dims(operand(node, 0)) or ()
    rank = len(shape) - 2
    strides = node.attributes.get_ints("strides") or [1] * rank
    dilations = node.attributes.get_ints("dilations") or [1] * rank
    pads = node.attributes.get_ints("pads") or [0] * (2 * rank)
    padding = node.attributes.get_ints("output_padding") or [0] * rank
    automatic = node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if kernel is None or len(kernel) != rank or automatic or "output_shape" in node.attributes:
        return WHOLE * rank
    found = ""
    for k, size in enumerate(shape[2:]):
        reach = (kernel[k] - 1) * dilations[k] + 1
        fits = reach == strides[k] if transposed else reach <= strides[k] and _divides(strides[k], size)
        found += SPATIAL[k] if fits and pads[k] == pads[k + rank] == padding[k] == 0 else WHOLE
    return found


def _convolution(node: ir.Node, weight: str, *, transposed: bool) -> Rule | None:
    group = node.attributes.get_int("group", 1)
    spatial = windows(node, _kernel(node), transposed=transposed)
    bias = operand(node, 2)
    linear = "each" if bias is None else ""
    if group > 1:
        parts = f"ng{spatial},g_,g->ng{spatial}"
        return rule(node, parts, units={"g": group}, linear=linear, local=fewer_groups)
    parts = f"nc{spatial},{weight}_,o->no{spatial}"
    if bias is None:
        return rule(node, parts, linear=linear)
    return rule(node, parts, whole="" if bias.dtype else "c", local=bias_once)


def _kernel(node: ir.Node) -> tuple[int, ...] | None:
    """The sizes of the kernel, where they are known."""
    weight = dims(operand(node, 1))
    sizes = () if weight is None else weight[2:]
    known = tuple(size for size in sizes if isinstance(size, int))
    return known if known and len(known) == len(sizes) else None


def _divides(stride: int, size: Dim) -> bool:
    return stride == 1 or (isinstance(size, int) and size % stride == 0)


def _per_channel(value: ir.Value | None) -> str:
    """The part for scales or zero points: one a channel, or one for all."""
    shape = dims(value)
    return "o" if shape is not None and len(shape) == 1 and shape != (1,) else "_"
