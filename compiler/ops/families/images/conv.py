"""Convolutions: images and channels are free, sharding the channels that are summed leaves a partial sum; groups are not split."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.families.arithmetic.bias import add_once, bias_once
from partc.compiler.ops.families.images.conv_backward import spread, weight
from partc.compiler.ops.families.images.windows import kernel_of, separate_windows, transposed_windows, windows_of
from partc.compiler.ops.node import dims, operand
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Local, Rule
from partc.compiler.ops.work import Dims

conv = op(
    "Conv",
    factors="nc_,oc_,o->no_",
    contracted="c",
    linear="each",
    partial=(0, 1),
    remarks="groups stay together; windows that do not overlap are free; linear without bias, which is added once",
    precision="low",
    kernel="convolution",
)


@conv.sharding
def _(node: ir.Node) -> Rule | None:
    return _convolution(node, "oc", transposed=False)


@conv.multiply_adds
def _of_filters(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Each element of the output is a product with one filter."""
    return [(*made, *given[1][1:])]


@conv.gradient
def _(g: GradientBuilder, dy: str, x: str, w: str, bias: str | None = None) -> Sequence[str | None]:
    """dX = ConvTranspose(dY, W); dW = the sum over images and positions of dY X; dB = sum(dY)."""
    windows = windows_of(g, x, dy, kernel_of(g, w))
    group = g.attribute("group", 1)
    dx = spread(g, dy, w, x, windows, group) if g.wants(0) else None
    dw = weight(g, x, dy, w, windows, group) if g.wants(1) else None
    return dx, dw, _over_images(g, dy) if g.wants(2) else None


conv_transpose = op(
    "ConvTranspose",
    factors="nc_,co_,o->no_",
    contracted="c",
    linear="each",
    partial=(0, 1),
    remarks="groups stay together; windows that do not overlap are free; linear without bias, which is added once",
    precision="low",
    kernel="convolution",
    columns_of_input=True,
)


@conv_transpose.sharding
def _(node: ir.Node) -> Rule | None:
    return _convolution(node, "co", transposed=True)


@conv_transpose.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Each element of the input is multiplied by one filter."""
    return [(*given[0], *given[1][1:])]


@conv_transpose.gradient
def _(g: GradientBuilder, dy: str, x: str, w: str, bias: str | None = None) -> Sequence[str | None]:
    """dX = Conv(dY, W); dW = that of a convolution which takes dY to X; dB = sum(dY)."""
    windows = transposed_windows(g, x, w)
    group = g.attribute("group", 1)
    dx = None
    if g.wants(0):
        strides, dilations = list(windows.strides), list(windows.dilations)
        dx = g.Conv(dy, w, strides=strides, dilations=dilations, pads=windows.pads, group=group)
    dw = weight(g, dy, x, w, windows, group) if g.wants(1) else None
    return dx, dw, _over_images(g, dy) if g.wants(2) else None


conv_integer = op(
    "ConvInteger",
    factors="nc_,oc_,_,o->no_",
    contracted="c",
    remarks="groups stay together; one zero point for all is replicated",
    kernel="convolution",
)


conv_integer.multiply_adds(_of_filters)


@conv_integer.sharding
def _(node: ir.Node) -> Rule | None:
    point = _per_channel(operand(node, 3))
    group = node.attributes.get_int("group", 1)
    if group > 1:
        return rule(node, f"ng_,g_,_,{point.replace('o', 'g')}->ng_", units={"g": group}, local=fewer_groups)
    spatial = separate_windows(node, _kernel(node))
    return rule(node, f"nc{spatial},oc_,_,{point}->no{spatial}")


qlinear_conv = op(
    "QLinearConv",
    factors="nc_,_,_,oc_,o,o,_,_,o->no_",
    replicated="c",
    remarks="groups stay together",
    kernel="convolution",
)


@qlinear_conv.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """As of a Conv, whose weights are the fourth operand here."""
    return [(*made, *given[3][1:])]


@qlinear_conv.sharding
def _(node: ir.Node) -> Rule | None:
    scale, point = (_per_channel(operand(node, k)) for k in (4, 5))
    group = node.attributes.get_int("group", 1)
    if group > 1:
        parts = f"ng_,_,_,g_,{scale},{point},_,_,g->ng_".replace("o", "g")
        return rule(node, parts, units={"g": group}, local=fewer_groups)
    return rule(node, f"nc_,_,_,oc_,{scale},{point},_,_,o->no_", replicated="c")


deform_conv = op(
    "DeformConv",
    factors="nc_,oc_,n_,o,n_->no_",
    contracted="c",
    linear="each",
    partial=(0, 1, 4),
    remarks="channels replicated where there are groups; linear without bias, which is added once",
    kernel="convolution",
)


deform_conv.multiply_adds(_of_filters)


@deform_conv.sharding
def _(node: ir.Node) -> Rule | None:
    linear = "" if operand(node, 3) is not None else None
    if node.attributes.get_int("group", 1) > 1:
        return rule(node, "n._,.._,n_,.,n_->n._", linear=linear)
    replicated = "c" if node.attributes.get_int("offset_group", 1) > 1 else ""
    local = None if operand(node, 3) is None else deform_bias_once
    return rule(node, "nc_,oc_,n_,o,n_->no_", replicated=replicated, linear=linear, local=local)


def fewer_groups(local: Local) -> None:
    """The node with as many groups as this rank has."""
    local.same(group=local.node.attributes.get_int("group", 1) // local.num_shards("g"))


def deform_bias_once(local: Local) -> None:
    """Adds the bias, operand 3 of DeformConv, to one term alone."""
    add_once(local, 3)


def _convolution(node: ir.Node, weight: str, *, transposed: bool) -> Rule | None:
    group = node.attributes.get_int("group", 1)
    spatial = separate_windows(node, _kernel(node), transposed=transposed)
    bias = operand(node, 2)
    linear = None if bias is None else ""
    if group > 1:
        parts = f"ng{spatial},g_,g->ng{spatial}"
        return rule(node, parts, units={"g": group}, linear=linear, local=fewer_groups)
    parts = f"nc{spatial},{weight}_,o->no{spatial}"
    if bias is None:
        return rule(node, parts, linear=linear)
    return rule(node, parts, replicated="" if bias.dtype else "c", linear="", local=bias_once)


def _kernel(node: ir.Node) -> tuple[int, ...] | None:
    """The sizes of the kernel, where they are known."""
    weight = dims(operand(node, 1))
    sizes = () if weight is None else weight[2:]
    known = tuple(size for size in sizes if isinstance(size, int))
    return known if known and len(known) == len(sizes) else None


def _per_channel(value: ir.Value | None) -> str:
    """The part for scales or zero points: one a channel, or one for all."""
    shape = dims(value)
    return "o" if shape is not None and len(shape) == 1 and shape != (1,) else "_"


def _over_images(g: GradientBuilder, dy: str) -> str:
    return g.sum(dy, [0, *range(2, g.rank(dy))])
