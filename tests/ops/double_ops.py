"""Ops in float64, written with numpy: those that neither onnxruntime nor the standard's reference computes so precisely, or fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Attributes = Mapping[str, Any]


def erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf)(x))


def gelu(x: Array) -> Array:
    return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2)


def gelu_tanh(x: Array) -> Array:
    return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)


def group_normalization(attributes: Attributes, x: Array, scale: Array, bias: Array) -> Array:
    grouped = x.reshape(x.shape[0], attributes["num_groups"], -1)
    centered = grouped - grouped.mean(-1, keepdims=True)
    normal = centered / np.sqrt(centered.var(-1, keepdims=True) + attributes.get("epsilon", 1e-5))
    wide = (-1, *[1] * (x.ndim - 2))
    return np.asarray(normal.reshape(x.shape) * scale.reshape(wide) + bias.reshape(wide))


def fused_matmul(attributes: Attributes, a: Array, b: Array) -> Array:
    sides = []
    for side, x in (("A", a), ("B", b)):
        x = np.moveaxis(x, 0, -2) if attributes.get(f"transBatch{side}") else x
        sides.append(np.swapaxes(x, -1, -2) if attributes.get(f"trans{side}") else x)
    return np.asarray(attributes.get("alpha", 1.0) * (sides[0] @ sides[1]))


def matmul_n_bits(attributes: Attributes, a: Array, blocks: Array, scales: Array) -> Array:
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1) if attributes["bits"] == 4 else blocks
    numbers = numbers.reshape(*scales.shape, -1) - 2.0 ** (attributes["bits"] - 1)
    return np.asarray(a @ (numbers * scales[..., None]).reshape(len(blocks), -1)[:, : attributes["K"]].T)


def conv(attributes: Attributes, x: Array, w: Array, bias: Array | None = None) -> Array:
    """Windows as a view of the padded image, contracted with the kernel group by group."""
    rank, group = w.ndim - 2, attributes.get("group", 1)
    strides, dilations = (list(attributes.get(name, [1] * rank)) for name in ("strides", "dilations"))
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    pads = list(attributes.get("pads", [0] * (2 * rank)))
    automatic = attributes.get("auto_pad", b"NOTSET")
    if automatic.startswith(b"SAME"):
        totals = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(x.shape[2:], strides, reach, strict=True)]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = [*small, *large] if automatic == b"SAME_UPPER" else [*large, *small]
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, rank + 2)))
    steps = [slice(None, None, step) for step in (*strides, *dilations)]
    view = view[(slice(None), slice(None), *steps)]
    axes = ([1, *range(rank + 2, 2 * rank + 2)], [1, *range(2, rank + 2)])
    parts = zip(np.split(view, group, axis=1), np.split(w, group, axis=0), strict=True)
    made = np.concatenate([np.moveaxis(np.tensordot(v, k, axes), -1, 1) for v, k in parts], axis=1)
    return made if bias is None else made + bias.reshape(-1, *[1] * rank)


def conv_transpose(attributes: Attributes, x: Array, w: Array, bias: Array | None = None) -> Array:
    """Every place of the kernel adds its product where it lies in the image; then the padding is taken off."""
    rank, group = w.ndim - 2, attributes.get("group", 1)
    strides, dilations = (list(attributes.get(name, [1] * rank)) for name in ("strides", "dilations"))
    rests = attributes.get("output_padding", [0] * rank)
    sizes = x.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    full = [(n - 1) * s + r + o for n, s, r, o in zip(sizes, strides, reach, rests, strict=True)]
    pads = list(attributes.get("pads", [0] * (2 * rank)))
    if "output_shape" in attributes:
        totals = [n - want for n, want in zip(full, attributes["output_shape"], strict=True)]
        pads = [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]
    made = np.zeros((x.shape[0], w.shape[1] * group, *full))
    for place in np.ndindex(*w.shape[2:]):
        at = [
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, dilations, sizes, strides, strict=True)
        ]
        kernel = w[(slice(None), slice(None), *place)]
        parts = zip(np.split(x, group, axis=1), np.split(kernel, group, axis=0), strict=True)
        products = [np.moveaxis(np.tensordot(image, k, ([1], [0])), -1, 1) for image, k in parts]
        made[(slice(None), slice(None), *at)] += np.concatenate(products, axis=1)
    kept = [slice(begin, n - end) for begin, end, n in zip(pads[:rank], pads[rank:], full, strict=True)]
    made = made[(slice(None), slice(None), *kept)]
    return made if bias is None else made + bias.reshape(-1, *[1] * rank)


STAND_INS: dict[str, Callable[..., Array]] = {
    "BiasGelu": lambda attributes, x, bias: gelu(x + bias),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Erf": lambda attributes, x: erf(x),
    "FastGelu": lambda attributes, x, bias=0.0: gelu_tanh(x + bias),
    "FusedMatMul": fused_matmul,
    "Gelu": lambda attributes, x: gelu_tanh(x) if attributes.get("approximate") == b"tanh" else gelu(x),
    "GroupNormalization": group_normalization,
    "MatMulNBits": matmul_n_bits,
    "QuickGelu": lambda attributes, x: x / (1 + np.exp(-attributes.get("alpha", 1.702) * x)),
    "Shrink": lambda attributes, x: np.where(np.abs(x) > attributes.get("lambd", 0.5), x, 0.0),
}
IMPRECISE: Sequence[str] = ("GroupNormalization", "LayerNormalization", "Shrink")
"""Ops that onnxruntime computes in single precision whatever their type; of LayerNormalization the statistics."""
