"""The seconds of a node on a target: of its work, by the curve that was measured of what bounds such an op.

What a node moves are its operands and what it makes; of an op that takes a few elements out of a large operand, twice what it makes.

A core computes the columns of a product in blocks of 16, so that 4 columns take as long as 16. A convolution is, for each record, a product
whose columns are the pixels of its image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.cost.machine import FALLBACK, MATMUL, Processor
from partc.compiler.cost.node import PRODUCT, VIEW, Known, multiply_adds
from partc.compiler.ops.registry import entry_of

CONVOLUTION = "convolution"
_TAKES_OUT = ("lookup", "layout")
_PER_MULTIPLY_ADD = 2
_COLUMNS = 16
"""Columns that a product computes together."""
_OF_INPUT = ("ConvTranspose",)
"""Convolutions whose columns are the pixels of what they read; of others those of what they make."""


@dataclass(frozen=True)
class Operand:
    """The sizes of an operand, None where only a run tells them, and the bytes of an element."""

    sizes: tuple[int, ...] | None
    item: float

    @property
    def bytes(self) -> float:
        """All of it; 0 where it is not known."""
        return 0.0 if self.sizes is None else math.prod(self.sizes) * self.item


@dataclass(frozen=True)
class NodeCost:
    """The kernel of a node; its operations, two for each multiply-add, in so many matrices; the bytes that it moves.

    `padding`: the columns that are computed for each column that is wanted.
    """

    kernel: str
    operations: float
    matrices: int
    moved: float
    padding: float = 1.0

    def seconds(self, processor: Processor) -> float:
        """On a target, without what its session takes."""
        if self.kernel == VIEW:
            return 0.0
        if self.kernel not in (PRODUCT, CONVOLUTION):
            return processor.kernel(self.kernel)(self.moved)
        curve = processor.products.get(self.kernel) or processor.products[MATMUL]
        computed = self.matrices * curve(self.padding * self.operations / self.matrices)
        return max(computed, processor.kernel(FALLBACK)(self.moved))


def cost_of(node: ir.Node, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]) -> NodeCost:
    """What a node computes and moves, of the sizes of its operands, None where these are absent."""
    entry = entry_of(node)
    kernel = entry.kernel if entry is not None else FALLBACK
    given, made = (sum(one.bytes for one in some if one is not None) for some in (inputs, outputs))
    moved = 2 * made if kernel in _TAKES_OUT else given + made
    sizes: list[list[Known]] = [[None if one is None else one.sizes for one in some] for some in (inputs, outputs)]
    operations = _PER_MULTIPLY_ADD * multiply_adds(node, *sizes)
    by_factors = entry is not None and entry.multiply_adds is None
    padding = _padding(node.op_type, kernel, *sizes) if kernel == CONVOLUTION or by_factors else 1.0
    return NodeCost(kernel, operations, _matrices(kernel, sizes[0], sizes[1]), moved, padding)


def _matrices(kernel: str, inputs: Sequence[Known], outputs: Sequence[Known]) -> int:
    """How many matrices a product multiplies: one where the second operand is a matrix."""
    if kernel != PRODUCT or len(inputs) < 2 or not inputs[1] or len(inputs[1]) < 3 or not outputs or not outputs[0]:
        return 1
    return max(1, math.prod(map(int, outputs[0][:-2])))


def _padding(op: str, kernel: str, inputs: Sequence[Known], outputs: Sequence[Known]) -> float:
    """The columns that are computed for each column of a product, or pixel of a convolution's images; one column is not padded."""
    made = next(iter(inputs if op in _OF_INPUT else outputs), None)
    if made is None or kernel not in (PRODUCT, CONVOLUTION):
        return 1.0
    columns = math.prod(map(int, made[2:])) if kernel == CONVOLUTION else int(made[-1]) if len(made) > 1 else 1
    return -(-columns // _COLUMNS) * _COLUMNS / columns if columns > (kernel == PRODUCT) else 1.0
