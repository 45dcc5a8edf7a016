"""How the windows of a convolution or a pooling lie in an image: what its attributes say, in numbers that gradients need."""

from __future__ import annotations

from dataclasses import dataclass

from partc.compiler.autodiff.engine import GradientBuilder, NoGradient


@dataclass(frozen=True)
class Windows:
    """How windows lie in an image: sizes a spatial dim, and the padding before and after."""

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
        """How far a window reaches."""
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
            if isinstance(size, int):
                total = max((-(-size // strides[k]) - 1) * strides[k] + reach - size, 0)
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
