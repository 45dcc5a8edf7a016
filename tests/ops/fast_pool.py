"""ONNX's reference of pools with all windows at once: most of the time that its node tests take to make goes into the loop over windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import onnx.reference.ops.op_pool_common as reference


def pool(
    padded: np.ndarray,
    x_shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    out_shape: Sequence[int],
    pooling_type: str,
    pads_required: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    count_include_pad: int = 0,
    p: int = 1,
) -> np.ndarray:
    """As `onnx.reference.ops.op_pool_common.pool`: a padded place holds nan, which counts only where it is said to."""
    dims = range(len(x_shape) - 2)
    need, given = (np.resize([0] if one is None else one, 2 * len(dims)) for one in (pads_required, pads))
    strides, dilations = strides or [1] * len(dims), [1] * len(dims) if dilations is None else dilations
    windows, inside = padded, np.array(True)
    for i in dims:
        last = x_shape[i + 2] + need[i] + need[i + len(dims)] - (1 + (kernel[i] - 1) * dilations[i])
        places = np.arange(int(last / strides[i] + 1))[:, None] * strides[i] + np.arange(kernel[i]) * dilations[i]
        fits = places < x_shape[i + 2] + given[i] + given[i + len(dims)]
        windows = windows.take(np.where(fits, places, 0), axis=2 + 2 * i)
        inside = inside[..., None, None] & fits
    inside = np.broadcast_to(inside, windows.shape)
    if windows.dtype.kind == "f" and (not count_include_pad or pooling_type == "MAX"):
        inside = inside & ~np.isnan(windows)
    axes = tuple(3 + 2 * i for i in dims)
    if pooling_type == "MAX":
        least = -np.inf if windows.dtype.kind == "f" else np.iinfo(windows.dtype).min
        made = windows.max(axes, where=inside, initial=least)
    elif pooling_type == "AVG":
        made = windows.mean(axes, where=inside)
    else:
        made = (np.abs(windows) ** p).sum(axes, where=inside) ** (1 / p)
    y = np.zeros([*x_shape[:2], *out_shape], padded.dtype)
    y[tuple(map(slice, made.shape))] = made
    return y


@contextmanager
def all_windows_at_once() -> Iterator[None]:
    """What imports the reference's `pool` meanwhile has this one."""
    loop, reference.pool = reference.pool, pool
    try:
        yield
    finally:
        reference.pool = loop
