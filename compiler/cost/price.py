"""The seconds of a node on a target: of its work, by the curve that was measured of what bounds such an op.

What a node moves are its operands and what it makes; of an op that takes a few elements out of a large operand, twice what it makes.
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
    """The kernel of a node; its operations, two for each multiply-add, in so many matrices; the bytes that it moves."""

    kernel: str
    operations: float
    matrices: int
    moved: float

    def seconds(self, processor: Processor) -> float:
        """On a target, without what its session takes."""
        if self.kernel == VIEW:
            return 0.0
        if self.kernel not in (PRODUCT, CONVOLUTION):
            return processor.kernel(self.kernel)(self.moved)
        curve = processor.products.get(self.kernel) or processor.products[MATMUL]
        computed = self.matrices * curve(self.operations / self.matrices)
        return max(computed, processor.kernel(FALLBACK)(self.moved))


def cost_of(node: ir.Node, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]) -> NodeCost:
    """What a node computes and moves, of the sizes of its operands, None where these are absent."""
    entry = entry_of(node)
    kernel = entry.kernel if entry is not None else FALLBACK
    given, made = (sum(one.bytes for one in some if one is not None) for some in (inputs, outputs))
    moved = 2 * made if kernel in _TAKES_OUT else given + made
    sizes: list[list[Known]] = [[None if one is None else one.sizes for one in some] for some in (inputs, outputs)]
    operations = _PER_MULTIPLY_ADD * multiply_adds(node, *sizes)
    return NodeCost(kernel, operations, _matrices(kernel, sizes[0], sizes[1]), moved)


def _matrices(kernel: str, inputs: Sequence[Known], outputs: Sequence[Known]) -> int:
    """How many matrices a product multiplies: one where the second operand is a matrix."""
    if kernel != PRODUCT or len(inputs) < 2 or not inputs[1] or len(inputs[1]) < 3 or not outputs or not outputs[0]:
        return 1
    return max(1, math.prod(map(int, outputs[0][:-2])))
