"""Weights of a product in blocks: unsigned integers of 4 or 8 bits, with a scale and a zero point for each block of the contracted dim.

    weight[n, order[k]] = (numbers[n, k] - points[n, k // block]) * scales[n, k // block]

A loader of quantized files returns a float tensor that is computed from the blocks, and has the blocks in its `meta`: a product reads the
blocks, all other ops read floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.computed import Box, ComputedTensor
from partc.compiler.ir.value_info import Array

BLOCKED = "partc.blocked"
"""Key of the `meta` of a tensor: its `BlockedWeight`."""
EXPERT_BLOCKS = "partc.expert_blocks"
"""Key of the `meta` of a value, a stack of experts' weights: its `ExpertBlocks`."""
_MOST_ELEMENTS = 1 << 22
"""The most elements that are unpacked at once."""


@dataclass(frozen=True)
class ExpertBlocks:
    """A stack of experts' weights in blocks: [experts, N, blocks, bytes], scales [experts, N, blocks], and the `attributes` of their
    products.

    `transposed`: whether the stack is [experts, N, K]. `where`: the line of the plan that quantizes them.
    """

    blocks: ir.TensorProtocol
    scales: ir.TensorProtocol
    attributes: Mapping[str, int]
    transposed: bool
    where: str


class Blocks(NamedTuple):
    """Numbers [N, blocks, block], zero points [N, blocks] and scales [N, blocks] of some columns and blocks."""

    numbers: Array
    points: Array
    scales: Array


@dataclass(frozen=True)
class BlockedWeight:
    """A weight [N, K] in blocks. `order`: the weight's index along K for each place in the blocks; None if they are in order.

    `symmetric`: whether all zero points are the middle, 8 or 128. `read`: returns the blocks in a slice of N and a slice of blocks.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    block: int
    symmetric: bool
    order: Array | None
    read: Callable[[slice, slice], Blocks]

    def tensor(self, dtype: ir.DataType, name: str) -> ComputedTensor:
        """Returns the weight in floats, with its blocks in the `meta`."""
        tensor = ComputedTensor(lambda box: self._floats(box, dtype), dtype, self.shape, name)
        tensor.meta[BLOCKED] = self
        return tensor

    def operands(self, dtype: ir.DataType) -> dict[str, ComputedTensor]:
        """Maps the operands of `MatMulNBits` to tensors: blocks, scales and, if the weight is not symmetric, packed zero points."""
        columns, count = self.shape[0], self.shape[1] // self.block
        per_byte = 8 // self.bits

        def points(box: Box) -> Array:
            first = slice(box[1].start * per_byte, min(box[1].stop * per_byte, count))
            return np.concatenate([_in_bytes(part.points, self.bits) for part in self._parts(box[0], first)])

        def scales(box: Box) -> Array:
            return np.concatenate([part.scales for part in self._parts(box[0], box[1])]).astype(dtype.numpy())

        def blocks(box: Box) -> Array:
            return np.concatenate([_in_bytes(part.numbers, self.bits) for part in self._parts(box[0], box[1])])[
                :, :, box[2]
            ]

        byte, size = ir.DataType.UINT8, self.block // per_byte
        operands = {
            "blocks": ComputedTensor(blocks, byte, (columns, count, size), f"{self.name}.blocks"),
            "scales": ComputedTensor(scales, dtype, (columns, count), f"{self.name}.scales"),
        }
        if not self.symmetric:
            operands["points"] = ComputedTensor(points, byte, (columns, -(-count // per_byte)), f"{self.name}.points")
        return operands

    def _parts(self, columns: slice, blocks: slice) -> Iterator[Blocks]:
        """Yields the blocks of a limited number of columns at a time."""
        step = max(1, _MOST_ELEMENTS // max(1, (blocks.stop - blocks.start) * self.block))
        for begin in range(columns.start, columns.stop, step):
            yield self.read(slice(begin, min(begin + step, columns.stop)), blocks)

    def _floats(self, box: Box, dtype: ir.DataType) -> Array:
        """Returns the elements within a box of [N, K]."""
        columns, rows = box
        ordered = self.order is None
        first, last = (
            (rows.start // self.block, -(-rows.stop // self.block)) if ordered else (0, self.shape[1] // self.block)
        )
        parts = []
        for part in self._parts(columns, slice(first, last)):
            numbers = part.numbers.astype(np.float32) - part.points[..., None].astype(np.float32)
            weight = (numbers * part.scales[..., None].astype(np.float32)).reshape(len(numbers), -1)
            if self.order is not None:
                placed = np.empty_like(weight)
                placed[:, self.order] = weight
                weight = placed
            begin = rows.start - first * self.block
            parts.append(weight[:, begin : begin + rows.stop - rows.start].astype(dtype.numpy()))
        return np.concatenate(parts)


def _in_bytes(numbers: Array, bits: int) -> Array:
    """Packs the last dim into bytes: two numbers of four bits a byte, the first in the low half; zeros fill up an odd length."""
    if bits == 8:
        return numbers
    if numbers.shape[-1] % 2:
        numbers = np.concatenate([numbers, np.zeros_like(numbers[..., :1])], axis=-1)
    low, high = numbers[..., 0::2], numbers[..., 1::2]
    packed: Array = low | (high << 4)
    return packed
