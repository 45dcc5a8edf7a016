"""Gradients of convolutions and pooling: strides, padding, dilations, groups, and the forms that shapes choose among."""

from __future__ import annotations

from typing import Any

from gradient_case import Proof, proof

SAME = {"auto_pad": "SAME_UPPER"}


def conv(x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, static: bool = False, **attributes: Any) -> Proof:
    """A convolution; sums of many products in single precision are close to a share of the largest."""
    fixed = {0: (1,), 1: tuple(range(len(w)))} | ({2: (0,)} if bias else {})
    return proof("Conv", [x, w, *([(w[0],)] if bias else [])], attributes, close=1e-3, fixed=fixed, static=static)


def transposed(x: tuple[int, ...], w: tuple[int, ...], static: bool = False, **attributes: Any) -> Proof:
    fixed = {0: (1,), 1: tuple(range(len(w)))}
    return proof("ConvTranspose", [x, w], attributes, close=1e-3, fixed=fixed, static=static)


def maximum(x: tuple[int, ...], *kernel: int, static: bool = False, **attributes: Any) -> Proof:
    return proof("MaxPool", [x], {"kernel_shape": kernel, **attributes}, fixed={0: (1,)}, static=static)


def average(x: tuple[int, ...], *kernel: int, static: bool = False, **attributes: Any) -> Proof:
    return proof("AveragePool", [x], {"kernel_shape": kernel, **attributes}, fixed={0: (1,)}, static=static)


def columns(x: tuple[int, ...], image: list[int], block: list[int], **attributes: Any) -> Proof:
    return proof("Col2Im", [x], attributes, constants={1: image, 2: block}, close=1e-3)


CASES = [
    conv((2, 6, 9, 8), (6, 6, 3, 3), bias=True),
    conv((2, 6, 9, 8), (6, 6, 3, 2), strides=[2, 3], pads=[1, 0, 2, 1]),
    conv((2, 6, 9, 8), (6, 6, 2, 3), dilations=[2, 1], strides=[1, 2]),
    conv((2, 6, 9, 8), (6, 6, 3, 3), strides=[2, 2], static=True, **SAME),
    conv((2, 6, 9, 8), (6, 6, 2, 3), auto_pad="SAME_LOWER"),
    conv((2, 6, 9, 8), (12, 6, 1, 1)),
    conv((2, 6, 9, 8), (12, 6, 1, 1), strides=[2, 2], pads=[0, 1, 1, 0]),
    conv((2, 6, 9, 8), (6, 1, 3, 2), group=6, bias=True, strides=[2, 1], pads=[1, 1, 0, 1]),
    conv((2, 12, 7, 5), (18, 2, 3, 2), group=6, dilations=[1, 2]),
    conv((2, 12, 7, 5), (12, 4, 3, 2), group=3, strides=[2, 2]),
    conv((2, 20, 7, 6), (6, 20, 3, 3), strides=[2, 1], pads=[1, 1, 1, 1]),
    conv((1, 9, 18, 17), (4, 9, 3, 3), pads=[1, 1, 1, 1]),
    conv((2, 9, 12, 11), (6, 9, 3, 2), pads=[0, 1, 1, 0]),
    conv((2, 3, 11, 9), (6, 3, 5, 4), strides=[2, 1], pads=[2, 1, 2, 2]),
    conv((2, 9, 9, 8), (6, 9, 7, 2), strides=[1, 2], dilations=[1, 3], pads=[1, 0, 2, 1]),
    conv((2, 9, 6, 5), (10, 9, 3, 2), strides=[2, 1], pads=[1, 0, 1, 1]),
    conv((2, 10, 7, 6), (12, 10, 2, 3), dilations=[2, 1], strides=[1, 2]),
    conv((2, 10, 6, 5), (12, 10, 1, 1), strides=[2, 2]),
    conv((2, 10, 11), (12, 10, 3), strides=[2], pads=[1, 0]),
    conv((2, 8, 4, 3, 5), (9, 8, 2, 2, 3)),
    conv((2, 6, 6, 6), (6, 6, 2, 2), strides=[2, 2]),
    conv((2, 6, 11), (6, 6, 3), strides=[2], pads=[1, 0]),
    conv((2, 2, 5, 4, 6), (6, 2, 2, 3, 2), strides=[2, 1, 1]),
    transposed((2, 6, 5, 4), (6, 6, 3, 3)),
    transposed((2, 6, 5, 4), (6, 6, 3, 2), strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 0]),
    transposed((2, 12, 5, 4), (12, 2, 3, 2), group=6, dilations=[2, 1]),
    transposed((2, 6, 5, 4), (6, 6, 3, 3), strides=[2, 2], output_shape=[10, 8], static=True),
    maximum((2, 6, 8, 6), 2, 2, strides=[2, 2]),
    maximum((2, 6, 9, 7), 2, 2, strides=[2, 3]),
    maximum((2, 6, 9, 8), 3, 3, strides=[2, 2], pads=[1, 1, 1, 1]),
    maximum((2, 6, 9, 8), 3, 2, dilations=[2, 1], strides=[1, 2]),
    maximum((2, 6, 9, 8), 2, 2, strides=[2, 3], static=True, **SAME),
    maximum((2, 6, 11), 3, strides=[2]),
    average((2, 6, 8, 6), 2, 2, strides=[2, 2]),
    average((2, 6, 9, 8), 3, 2, strides=[2, 2]),
    average((2, 6, 9, 8), 3, 3, strides=[2, 2], pads=[1, 1, 1, 0]),
    average((2, 6, 9, 8), 3, 3, strides=[2, 2], pads=[1, 1, 1, 0], count_include_pad=1),
    average((2, 6, 9, 8), 3, 3, strides=[1, 2], static=True, auto_pad="SAME_UPPER"),
    average((2, 6, 11), 3),
    proof("MaxPool", [(2, 6, 9, 8)], {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}, static=True),
    proof("AveragePool", [(2, 6, 9, 8)], {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}, static=True),
    columns((2, 12, 24), [6, 5], [3, 2], pads=[1, 0, 1, 0]),
    columns((2, 18, 12), [9, 7], [2, 3], strides=[2, 1], dilations=[2, 2]),
    proof("GlobalAveragePool", [(2, 6, 4, 6)]),
    proof("GlobalMaxPool", [(2, 6, 4, 6)]),
]
