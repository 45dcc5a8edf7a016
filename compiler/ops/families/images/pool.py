"""Pooling: images and channels are free; global pooling also contracts the positions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.ops.families.images.conv_backward import TO_THE_END, spread
from partc.compiler.ops.families.images.windows import SPATIAL, Windows, separate_windows, windows_of
from partc.compiler.ops.node import rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Local, Rule

FEW_PLACES = 4
"""Up to so many places of a kernel comparing each with the output is faster than a pooling that tells its indices, on one core."""

average_pool = op(
    "AveragePool",
    factors="nc_->nc_",
    linear="joint",
    remarks="windows that do not overlap are free",
    precision="follow",
    kernel="reduction",
)


lp_pool = op("LpPool", factors="nc_->nc_", remarks="windows that do not overlap are free", kernel="reduction")


@average_pool.sharding
@lp_pool.sharding
def _windowed(node: ir.Node) -> Rule | None:
    spatial = separate_windows(node, node.attributes.get_ints("kernel_shape"))
    return rule(node, f"nc{spatial}->nc{spatial}")


@average_pool.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = the transposed convolution of dY / n with ones, n being how many numbers a window averaged."""
    kernel = tuple(g.attribute("kernel_shape"))
    windows = windows_of(g, x, dy, kernel)
    share = g.Div(dy, _counts(g, x, dy, windows))
    rank = len(kernel)
    ones = g.constant(np.ones((1, 1, *kernel)), dy)
    shape = g.shape(x)
    if shape is None or not isinstance(shape[1], int):
        raise NoGradient("AveragePool over an unknown number of channels")
    single = g.reshape(share, [-1, 1, *[0] * rank])
    return g.reshape(spread(g, single, ones, x, windows, 1), [-1, shape[1], *[0] * rank])


max_pool = op(
    "MaxPool",
    factors="nc_->nc_",
    gradient_outputs=1,
    remarks="windows that do not overlap are free; replicated where its indices, which count through the input, are outputs",
    precision="follow",
    rounds="exact",
    kernel="reduction",
)


@max_pool.sharding
def _(node: ir.Node) -> Rule | None:
    if len(node.outputs) > 1:
        return None
    return _windowed(node)


@max_pool.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY at the place of the first that is the largest; MaxUnpool where windows do not overlap."""
    windows = windows_of(g, x, dy, tuple(g.attribute("kernel_shape")))
    if g.attribute("storage_order", 0):
        raise NoGradient("MaxPool counts its indices by columns (storage_order is 1)")
    apart = all(reach <= stride for reach, stride in zip(windows.reach, windows.strides, strict=True))
    plain = not any(windows.pads) and set(windows.dilations) == {1} and not g.attribute("ceil_mode", 0)
    if apart and plain and g.dtype(x) == ir.DataType.FLOAT:
        sizes = {"kernel_shape": list(windows.kernel), "strides": list(windows.strides)}
        return g.MaxUnpool(dy, _largest(g, x, dy, windows), g.shape_of(x), **sizes)
    zero = ir.tensor(np.zeros(1, g.dtype(x).numpy()))
    flat = g.ConstantOfShape(g.reshape(g.size_of(x), [1]), value=zero)
    indices = g.reshape(g.output(1), [-1])
    return g.Reshape(g.ScatterElements(flat, indices, g.reshape(dy, [-1]), axis=0, reduction="add"), g.shape_of(x))


global_average_pool = op("GlobalAveragePool", factors="nchw->nc..", contracted="hw", linear="joint", kernel="reduction")


@global_average_pool.sharding
def _(node: ir.Node) -> Rule | None:
    return _over_all(node, "sum")


@global_average_pool.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY / n for the n positions."""
    return g.Expand(g.Div(dy, g.size_of(x, range(2, g.rank(x)), like=x)), g.shape_of(x))


global_max_pool = op(
    "GlobalMaxPool", factors="nchw->nc..", contracted={"h": "max", "w": "max"}, precision="follow", kernel="reduction"
)


@global_max_pool.sharding
def _(node: ir.Node) -> Rule | None:
    return _over_all(node, "max")


@global_max_pool.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY where X is the largest; equal ones share it."""
    chosen = g.mask(g.Equal(x, g.output(0)), x)
    return g.Mul(chosen, g.Div(dy, g.sum(chosen, range(2, g.rank(x)), keepdims=True)))


op("GlobalLpPool", factors="nc_->nc_", kernel="reduction")


op("MaxRoiPool", factors=".c..,r.->rc..", precision="follow", rounds="exact")


op(
    "MaxUnpool",
    factors="_,_,_->_",
    linear="joint",
    partial=(0,),
    remarks="replicated, for its indices count through the output",
    precision="follow",
)


@global_average_pool.local
def scaled(local: Local) -> None:
    """A mean over a shard, divided by the number of shards: a term of the global mean."""
    shards = 1
    for factor in local.rule.reduce:
        shards *= local.num_shards(factor)
    if shards == 1:
        local.same()
        return
    data = local.node.inputs[0]
    assert data is not None
    assert data.dtype is not None
    mean = f"{local.outputs[0]}.mean"
    local.same(outputs=[mean])
    share = local.constant("share", np.array(1 / shards, data.dtype.numpy()))
    local.give("Mul", [mean, share], local.outputs[0])


def _over_all(node: ir.Node, reduction: str) -> Rule | None:
    data = node.inputs[0]
    spatial = SPATIAL[: (rank_of(data) or 2) - 2]
    untyped = reduction == "sum" and (data is None or not data.dtype)
    return rule(
        node,
        f"nc{spatial}->nc{'.' * len(spatial)}",
        contracted=dict.fromkeys(spatial, reduction),
        replicated=spatial if untyped else "",
    )


def _largest(g: GradientBuilder, x: str, dy: str, windows: Windows) -> str:
    """The index of the first number of every window that is the largest, in the order of the whole input.

    The node itself tells it, in a pooling that is ten times as slow; few places are found faster by comparing each with the output.
    """
    shape, counts = g.shape(x) or (None,), g.shape(dy) or (None,)
    sizes = [dim for dim in shape[1:] if isinstance(dim, int)]
    pooled = [dim for dim in counts[2:] if isinstance(dim, int)]
    if math.prod(windows.kernel) > FEW_PLACES or len(sizes) < len(shape) - 1 or len(pooled) < len(counts) - 2:
        return g.output(1)
    steps = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    places = [sum(at * step for at, step in zip(p, steps[1:], strict=True)) for p in np.ndindex(*windows.kernel)]
    # A window may end before the image, where a slice to the end would have one more.
    axes, strides = g.constant(list(range(2, len(shape)))), g.constant(list(windows.strides))
    index = g.constant(places[-1])
    for place, starts in reversed(list(zip(places, np.ndindex(*windows.kernel), strict=True))[:-1]):
        ends = [
            at + (count - 1) * stride + 1 for at, count, stride in zip(starts, pooled, windows.strides, strict=True)
        ]
        seen = g.Slice(x, g.constant(list(starts)), g.constant(ends), axes, strides)
        index = g.Where(g.Equal(seen, g.output(0)), g.constant(place), index)
    grid = np.indices((sizes[0], *pooled)).astype(np.int64)
    begins = sum(
        one * step for one, step in zip(grid, [steps[0], *np.multiply(steps[1:], windows.strides)], strict=True)
    )
    images = g.Range(g.constant(0), g.size_of(x), g.constant(math.prod(sizes)))
    first = g.unsqueeze(images, *range(1, len(shape)))
    return g.Add(g.Add(index, g.constant(np.asarray(begins)[None])), first)


def _counts(g: GradientBuilder, x: str, dy: str, windows: Windows) -> str:
    """The number of elements that each window averages: all of the kernel, or those inside the image, or inside its padding."""
    places = math.prod(windows.kernel)
    rank = len(windows.kernel)
    padded = bool(g.attribute("count_include_pad", 0))
    own = g.attribute("pads") or [0] * (2 * rank)
    automatic = g.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if not any(windows.pads) or (padded and (automatic or windows.pads == own)):
        return g.constant(places, dy)
    inside = windows.pads if automatic or not padded else [w - o for w, o in zip(windows.pads, own, strict=True)]
    ones = g.constant(np.ones((1, 1, *windows.kernel)), dy)
    sizes = g.Slice(g.shape_of(x), g.constant([2]), g.constant([TO_THE_END]))
    image = g.Concat(g.constant([1, 1]), sizes, axis=0)
    if padded and not automatic:
        grown = [before + after for before, after in zip(own[:rank], own[rank:], strict=True)]
        image = g.Add(image, g.constant([0, 0, *grown]))
    one = ir.tensor(np.ones(1, g.dtype(dy).numpy()))
    covered = g.ConstantOfShape(image, value=one)
    strides, dilations = list(windows.strides), list(windows.dilations)
    return g.Conv(covered, ones, strides=strides, dilations=dilations, pads=inside)
