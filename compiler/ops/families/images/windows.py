"""The positions of the windows of a convolution or a pooling in an image.

Along a spatial dim neighbouring windows overlap, and so it stays replicated, but where every window lies in its own stretch of the
input: a kernel no larger than its stride, no padding, and an input that the stride divides. Then shards have whole windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.ops.node import dims, operand
from partc.compiler.ops.rule import WHOLE

SPATIAL = "hwdefgijk"


@dataclass(frozen=True)
class Windows:
    """The windows in an image: per spatial dim their sizes, and the padding before and after."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def pads(self) -> list[int]:
        """The padding as ONNX writes it."""
        return [*self.begin, *self.end]

    @property
    def reach(self) -> tuple[int, ...]:
        """The extent that a dilated window covers in each spatial dim."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))


def windows_of(g: GradientBuilder, x: str, dy: str, kernel: tuple[int, ...]) -> Windows:
    """The windows of a convolution or pooling over `x`; the padding is grown to what the last windows reach (ceil_mode)."""
    rank = len(kernel)
    strides = tuple(g.attribute("strides") or [1] * rank)
    dilations = tuple(g.attribute("dilations") or [1] * rank)
    pads = g.attribute("pads") or [0] * (2 * rank)
    automatic = g.attribute("auto_pad", "NOTSET")
    begin, end = list(pads[:rank]), list(pads[rank:])
    image, made = g.shape(x), g.shape(dy)
    for k in range(rank):
        reach = dilations[k] * (kernel[k] - 1) + 1
        size, count = (image[k + 2], made[k + 2]) if image and made else (None, None)
        if automatic.startswith("SAME"):
            if reach > kernel[k]:
                raise NoGradient(f"{automatic} with dilation {dilations[k]}, for which onnxruntime pads as without it")
            if isinstance(size, int):
                total = (-(-size // strides[k]) - 1) * strides[k] + reach - size
                if total < -1:
                    law = "onnxruntime begins behind the first element"
                    raise NoGradient(f"{automatic} with kernel {reach} and stride {strides[k]} over {size}: {law}")
                total = max(total, 0)
            elif strides[k] == 1:
                total = reach - 1
            else:
                raise NoGradient(f"{automatic} with stride {strides[k]} over an image of unknown size")
            begin[k] = total // 2 if automatic == "SAME_UPPER" else total - total // 2
            end[k] = total - begin[k]
        elif g.attribute("ceil_mode", 0):
            if not isinstance(size, int) or not isinstance(count, int):
                raise NoGradient("ceil_mode over an image of unknown size")
            end[k] = max(end[k], (count - 1) * strides[k] + reach - size - begin[k])
    return Windows(kernel, strides, dilations, tuple(begin), tuple(end))


def transposed_windows(g: GradientBuilder, x: str, w: str) -> Windows:
    """The windows of the convolution that goes back from the output of a ConvTranspose to its input."""
    kernel = kernel_of(g, w)
    rank = len(kernel)
    strides = tuple(g.attribute("strides") or [1] * rank)
    dilations = tuple(g.attribute("dilations") or [1] * rank)
    pads = g.attribute("pads") or [0] * (2 * rank)
    rests = g.attribute("output_padding") or [0] * rank
    asked = g.attribute("output_shape")
    automatic = g.attribute("auto_pad", "NOTSET")
    begin, end = list(pads[:rank]), list(pads[rank:])
    if asked or automatic.startswith("SAME"):
        image = g.shape(x)
        for k in range(rank):
            size = image[k + 2] if image else None
            reach = dilations[k] * (kernel[k] - 1) + 1
            if asked and not isinstance(size, int):
                raise NoGradient("output_shape with an image of unknown size")
            if asked and isinstance(size, int):
                total = (size - 1) * strides[k] + rests[k] + reach - asked[k - rank]
            else:
                total = rests[k] + reach - strides[k]
            total = max(total, 0)
            begin[k] = total - total // 2 if automatic == "SAME_LOWER" else total // 2
            end[k] = total - begin[k]
    return Windows(kernel, strides, dilations, tuple(begin), tuple(end))


def kernel_of(g: GradientBuilder, w: str) -> tuple[int, ...]:
    """The sizes of a kernel."""
    size = g.static(w)
    if size is None:
        raise NoGradient("a kernel of unknown size")
    return tuple(size[2:])


def separate_windows(node: ir.Node, kernel: Sequence[int] | None, *, transposed: bool = False) -> str:
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
    letters = ""
    for k, size in enumerate(shape[2:]):
        reach, stride = (kernel[k] - 1) * dilations[k] + 1, strides[k]
        divides = stride == 1 or (isinstance(size, int) and size % stride == 0)
        fits = reach == stride if transposed else reach <= stride and divides
        letters += SPATIAL[k] if fits and pads[k] == pads[k + rank] == padding[k] == 0 else WHOLE
    return letters
