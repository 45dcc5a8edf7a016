"""The op table's facts about the time of a node: the kernel that computes it, its number of multiply-adds, the cost of an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import onnx_ir as ir

Kernel: TypeAlias = Literal[
    "view",
    "elementwise",
    "function",
    "product",
    "convolution",
    "reduction",
    "sort",
    "normalization",
    "layout",
    "lookup",
    "scatter",
]
"""What bounds the time of an op: nothing (a view), bytes (elementwise), a function of each element, or as the name says."""
Dims: TypeAlias = Sequence[int | str]
"""The dims of a value, numbers or expressions."""
Products = Callable[["ir.Node", Sequence[Dims], Dims], Sequence[Dims]]
"""Takes a node, the dims of its operands, () where these are absent, and those of its first output; gives terms, each a product of dims."""
RowOf = Callable[["ir.Node", Sequence[Dims]], Dims]
"""Takes a node and the dims of its operands, () where these are absent; gives the dims of what one index takes."""


@dataclass(frozen=True)
class Work:
    """What the time of a node of an op follows from.

    `kernel`: what bounds it. `multiply_adds`: how many a node has, where these are not the product of all factors, one of which is
    contracted between two operands, nor one for each element. `row`: the dims of what one index of a lookup or a scatter takes; None for
    one element. `columns_of_input`: of a convolution, whether the columns of its products are the pixels of what it reads, not of what it
    makes.
    """

    kernel: Kernel = "elementwise"
    multiply_adds: Products | None = None
    row: RowOf | None = None
    columns_of_input: bool = False
