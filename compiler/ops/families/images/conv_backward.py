"""The gradient of a convolution through its windows: the cotangent of its input, and of its weight.

The cotangent of the input is the transposed convolution of the output's. That of the weight is a product a place of the kernel, dY
times the input as this place saw it; which form computes it fastest depends on the shapes (see `weight`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import like
from partc.compiler.ops.families.images.windows import Windows

# Where one form of a product becomes faster than another, measured on one core at 1 to 64 images.
FEW_CHANNELS = 8
WIDE_KERNEL, LARGE_KERNEL = 5, 7
SMALL_IMAGE, LARGE_IMAGE = 64, 256
TO_THE_END = np.iinfo(np.int64).max


def spread(g: GradientBuilder, dy: str, w: str, x: str, windows: Windows, group: int) -> str:
    """The transposed convolution: scatters what windows made over an image of the size of `x`.

    Where the image is larger than all windows together, the rest is zero; where only a run tells, the largest rest is made and cut.
    Of small images, for each of which a transposed convolution would read the whole weight, all are one product.
    """
    if group == 1 and _together(g, dy, w, x):
        return _spread_together(g, dy, w, x, windows)
    image, made = (g.shape(one) for one in (x, dy))
    rests: list[int] = []
    exact = True
    for k, stride in enumerate(windows.strides):
        size, count = (image[k + 2], made[k + 2]) if image and made else (None, None)
        if stride == 1:
            rests.append(0)
        elif isinstance(size, int) and isinstance(count, int):
            rests.append(size + windows.begin[k] + windows.end[k] - (count - 1) * stride - windows.reach[k])
        else:
            rests.append(stride - 1)
            exact = False
    attributes = {"strides": list(windows.strides), "dilations": list(windows.dilations), "group": group}
    dx = g.ConvTranspose(dy, w, pads=windows.pads, output_padding=rests, **attributes)
    if exact:
        return dx
    axes = list(range(2, g.rank(x)))
    ends = g.Slice(g.shape_of(x), g.constant([2]), g.constant([TO_THE_END]))
    return g.Slice(dx, g.constant(np.zeros(len(axes), np.int64)), ends, g.constant(axes))


def _together(g: GradientBuilder, dy: str, w: str, x: str) -> bool:
    """Whether the images are small, their sizes known, and the channels many; Col2Im is there for float32 alone."""
    size, image = g.static(w), (g.shape(x) or (None, None, None))[2:]
    many = size is not None and min(size[:2]) >= FEW_CHANNELS and g.dtype(dy) == ir.DataType.FLOAT
    return many and _positions(g, dy) < SMALL_IMAGE and all(isinstance(dim, int) for dim in image)


def _spread_together(g: GradientBuilder, dy: str, w: str, x: str, windows: Windows) -> str:
    """The rows of all images times the weight are the columns of every window, which Col2Im adds up."""
    size, image = g.static(w) or (), g.shape(x) or ()
    columns = math.prod(size[1:])
    product = g.MatMul(_rows(g, dy), g.reshape(w, [size[0], columns]))
    turned = g.Transpose(g.reshape(product, [-1, _positions(g, dy), columns]), perm=[0, 2, 1])
    sizes = (g.constant(np.array(one, np.int64)) for one in (image[2:], windows.kernel))
    strides, dilations = list(windows.strides), list(windows.dilations)
    return like(g, g.Col2Im(turned, *sizes, strides=strides, dilations=dilations, pads=windows.pads), x)


def weight(g: GradientBuilder, x: str, dy: str, w: str, windows: Windows, group: int) -> str:
    """The cotangent of a convolution's weight, in the form that is fastest for its shapes.

    Depthwise: a product a place, element by element. Groups, or a small kernel over few channels: columns by a convolution with
    one-hot kernels. A larger kernel over few channels: a convolution by dY. Else products of matrices: of small images one
    product with the columns of every window; of others one a place, images in order of channels where they are large or the
    kernel is one place.
    """
    size = g.static(w)
    if size is None or g.shape(dy) is None:
        raise NoGradient("a weight of unknown size")
    largest, positions = max(windows.kernel), _positions(g, dy)
    few = size[1] < FEW_CHANNELS and math.prod(windows.kernel) > 1
    if group > 1 and group == size[0] and size[1] == 1:
        return _depthwise(g, x, dy, size, windows)
    if group > 1 or (few and largest < WIDE_KERNEL):
        return _by_columns(g, x, dy, size, windows, group)
    if few or largest >= LARGE_KERNEL:
        return _by_convolution(g, x, dy, size, windows)
    if positions < SMALL_IMAGE:
        return _by_rows(g, x, dy, size, windows)
    if positions >= LARGE_IMAGE or math.prod(windows.kernel) == 1:
        return _by_place(g, x, dy, size, windows)
    return _by_place_channels_last(g, x, dy, size, windows)


def _by_place(g: GradientBuilder, x: str, dy: str, size: Sequence[int], windows: Windows) -> str:
    """dW[o, c, place] = sum over images of dY[o, :] X[c, :] at the place."""
    flat = g.reshape(dy, [0, size[0], -1])
    found = []
    for seen in _seen(g, x, windows, first=2):
        product = g.MatMul(flat, g.mT(g.reshape(seen, [0, size[1], -1])))
        found.append(g.unsqueeze(g.sum(product, [0]), 2))
    return g.reshape(found[0] if len(found) == 1 else g.Concat(*found, axis=2), size)


def _by_place_channels_last(g: GradientBuilder, x: str, dy: str, size: Sequence[int], windows: Windows) -> str:
    """The same with channels last, where all images are rows of one product."""
    rows = _rows(g, dy)
    found = []
    for seen in _seen(g, g.Transpose(x, perm=_last(len(size))), windows, first=1):
        found.append(g.unsqueeze(g.Gemm(rows, g.reshape(seen, [-1, size[1]]), transA=1), 0))
    stacked = found[0] if len(found) == 1 else g.Concat(*found, axis=0)
    return g.reshape(g.Transpose(stacked, perm=[1, 2, 0]), size)


def _by_rows(g: GradientBuilder, x: str, dy: str, size: Sequence[int], windows: Windows) -> str:
    """One product of all images' rows: what each window sees is put in the order of the weight, which is larger, before it."""
    seen = _seen(g, g.Transpose(x, perm=_last(len(size))), windows, first=1)
    columns = g.reshape(seen[0], [-1, size[1]])
    if len(seen) > 1:
        joined = g.Concat(*(g.reshape(one, [-1, 1, size[1]]) for one in seen), axis=1)
        columns = g.reshape(g.Transpose(joined, perm=[0, 2, 1]), [-1, math.prod(size[1:])])
    return g.reshape(g.Gemm(_rows(g, dy), columns, transA=1), size)


def _by_convolution(g: GradientBuilder, x: str, dy: str, size: Sequence[int], windows: Windows) -> str:
    """The convolution of X by dY with images as channels, strides and dilations in each other's place."""
    turn = [1, 0, *range(2, len(size))]
    strides, dilations = list(windows.dilations), list(windows.strides)
    gradient = g.Conv(
        g.Transpose(x, perm=turn), g.Transpose(dy, perm=turn), strides=strides, dilations=dilations, pads=windows.pads
    )
    spatial = range(2, len(size))
    if (g.static(gradient) or ())[2:] != windows.kernel:
        starts, axes = np.zeros(len(spatial), np.int64), g.constant(np.array(spatial, np.int64))
        gradient = g.Slice(gradient, g.constant(starts), g.constant(np.array(windows.kernel, np.int64)), axes)
    return g.reshape(g.Transpose(gradient, perm=turn), size)


def _depthwise(g: GradientBuilder, x: str, dy: str, size: Sequence[int], windows: Windows) -> str:
    """dW[c, place] = sum over images and positions of dY[c] X[c] at the place."""
    axes = [0, *range(2, len(size))]
    found = [g.unsqueeze(g.sum(g.Mul(dy, seen), axes), 1) for seen in _seen(g, x, windows, first=2)]
    return g.reshape(found[0] if len(found) == 1 else g.Concat(*found, axis=1), size)


def _by_columns(g: GradientBuilder, x: str, dy: str, size: Sequence[int], windows: Windows, group: int) -> str:
    """The places of every window as columns, made by a convolution with one-hot kernels; then one product an image and group."""
    columns = _as_columns(g, columns_of(g, x, windows), x, dy, [group, math.prod(size[1:])])
    rows = g.reshape(dy, [0, group, size[0] // group, -1])
    return g.reshape(g.sum(g.MatMul(rows, g.mT(columns)), [0]), size)


def columns_of(g: GradientBuilder, x: str, windows: Windows) -> str:
    """The elements that each place of the kernel sees in each channel, as further channels (im2col)."""
    places = math.prod(windows.kernel)
    one_hot = g.constant(np.eye(places).reshape(places, 1, *windows.kernel), x)
    single = g.reshape(x, [-1, 1, *[0] * len(windows.kernel)])
    strides, dilations = list(windows.strides), list(windows.dilations)
    return g.Conv(single, one_hot, strides=strides, dilations=dilations, pads=windows.pads)


def _as_columns(g: GradientBuilder, columns: str, x: str, dy: str, inner: list[int]) -> str:
    """Columns of single channels as (image, group, column, position)."""
    image, made = g.shape(x), g.shape(dy)
    if image and isinstance(image[0], int):
        return g.reshape(columns, [image[0], *inner, -1])
    positions = [dim for dim in (made or (None,))[2:] if isinstance(dim, int)]
    if made and len(positions) == len(made) - 2:
        return g.reshape(columns, [-1, *inner, math.prod(positions)])
    images = g.Slice(g.shape_of(x), g.constant([0]), g.constant([1]))
    return g.Reshape(columns, g.Concat(images, g.constant([*inner, -1]), axis=0))


def _seen(g: GradientBuilder, x: str, windows: Windows, first: int) -> list[str]:
    """What each place of the kernel sees of an image, whose spatial dims begin at `first`: a slice for each."""
    rank = len(windows.kernel)
    if any(windows.pads):
        others = g.rank(x) - rank - first
        before, after = [0] * first, [0] * others
        x = g.Pad(x, g.constant([*before, *windows.begin, *after, *before, *windows.end, *after]))
    if math.prod(windows.kernel) == 1 and set(windows.strides) == {1}:
        return [x]
    axes = g.constant(list(range(first, first + rank)))
    strides = g.constant(list(windows.strides))
    slices = []
    for place in np.ndindex(*windows.kernel):
        starts = [at * d for at, d in zip(place, windows.dilations, strict=True)]
        left = [reach - 1 - start for reach, start in zip(windows.reach, starts, strict=True)]
        ends = [-one if one else TO_THE_END for one in left]
        slices.append(g.Slice(x, g.constant(starts), g.constant(ends), axes, strides))
    return slices


def _rows(g: GradientBuilder, dy: str) -> str:
    """The positions of all images as rows of channels."""
    shape = g.shape(dy) or ()
    return g.reshape(g.Transpose(dy, perm=_last(len(shape))), [-1, int(str(shape[1]))])


def _last(rank: int) -> list[int]:
    """The order that puts channels last."""
    return [0, *range(2, rank), 1]


def _positions(g: GradientBuilder, dy: str) -> int:
    """How many windows an image has; where only a run tells, as many as the forms between small and large images are for."""
    dims = (g.shape(dy) or (None, None, None))[2:]
    known = [dim for dim in dims if isinstance(dim, int)]
    return math.prod(known) if len(known) == len(dims) else SMALL_IMAGE
