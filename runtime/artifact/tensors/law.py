"""Laws of first values: rules that compute any part of a tensor by itself, so that no process needs the full tensor.

    {"draw": "normal", "stream": "7/table.weight", "factor": 0.01}

Element i of the tensor, in row-major order, is `offset + factor * d`, where d is the i-th number of the stream. So each rank draws its own
shard, and the numbers do not depend on the sharding. They are rounded from double precision to the tensor's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.tensors import draw
from partc.runtime.artifact.tensors.boxes import Region
from partc.runtime.artifact.tensors.boxes import full_region as whole_region
from partc.runtime.artifact.tensors.dtypes import Array

_SOURCES: Mapping[str, Callable[[str, int, int], Iterator[draw.Floats]]] = {
    "constant": draw.zeros,
    "uniform": draw.uniform,
    "normal": draw.normal,
    "truncated_normal": draw.truncated_normal,
}


def fill(law: Law, out: Array, shape: tuple[int, ...], held: Region) -> None:
    """Writes the region `held` of the tensor of this `shape` into `out`, an array of the region's shape."""
    _fill(out, law, 0, shape, held.begin, held.end)
    for row in law.zero_rows:
        if shape and held.begin[0] <= row < held.end[0]:
            out[row - held.begin[0]] = 0


def full_tensor(law: Law, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Returns the full tensor of a law."""
    out = np.empty(shape, dtype)
    fill(law, out, shape, whole_region(shape))
    return out


def law_text(law: Law) -> str:
    """The law as text: `0.01 * normal(7/table.weight)`."""
    if law.draw == "constant":
        text = f"{law.offset:g}"
    else:
        scaled = f"{law.factor:g} * {law.draw}({law.stream})"
        text = f"{law.offset:g} + {scaled}" if law.offset else scaled
    return text + (f", rows {', '.join(map(str, law.zero_rows))} zero" if law.zero_rows else "")


def _numbers(law: Law, count: int, start: int) -> Iterator[draw.Floats]:
    """Yields `count` elements, in blocks, from place `start` of the tensor on; `zero_rows` are not applied."""
    for block in _SOURCES[law.draw](law.stream, count, start):
        block *= law.factor
        block += law.offset
        yield block


def _fill(
    out: Array, law: Law, start: int, shape: tuple[int, ...], begin: tuple[int, ...], end: tuple[int, ...]
) -> None:
    """Writes the region from `begin` to `end` of the part of the tensor that begins at element `start` and has this `shape`."""
    width = math.prod(shape[1:])
    if not out.size:
        return
    first = begin[0] if begin else 0
    if all(low == 0 and high == size for low, high, size in zip(begin[1:], end[1:], shape[1:], strict=True)):
        flat, at = out.reshape(-1), 0
        for block in _numbers(law, out.size, start + first * width):
            flat[at : at + block.size] = block
            at += block.size
    elif width > draw.BLOCK:
        for row in range(first, end[0]):
            _fill(out[row - first], law, start + row * width, shape[1:], begin[1:], end[1:])
    else:
        columns = tuple(slice(low, high) for low, high in zip(begin[1:], end[1:], strict=True))
        step = draw.BLOCK // width
        for row in range(first, end[0], step):
            rows = min(step, end[0] - row)
            drawn = np.concatenate([*_numbers(law, rows * width, start + row * width)]).reshape(rows, *shape[1:])
            out[row - first : row - first + rows] = drawn[(slice(None), *columns)]
