"""Sizes of values at typical sizes of all symbols, used only to compare values and to balance work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.ir.program import Typed
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE

TYPICAL = 128
"""The size of a symbol at which values are compared: the first legal one from here on, or the largest."""


class TypicalSizes:
    """Bytes, elements and operations at typical sizes of all symbols, or at those that are `given`."""

    def __init__(self, program: Typed, given: Mapping[str, int] | None = None) -> None:
        self.program, self.given = program, given or {}

    @cached_property
    def known(self) -> dict[str, Facts]:
        chosen = {name: self.given.get(name, _typical(info.facts)) for name, info in self.program.symbols.items()}
        return {name: Facts.constant(size) for name, size in chosen.items()}

    @cached_property
    def dims(self) -> dict[str, int]:
        return {}

    def dim(self, dim: int | str) -> int:
        if isinstance(dim, int):
            return dim
        if dim not in self.dims:
            facts = facts_of(dim, self.known)
            self.dims[dim] = max(0, facts.value if facts.value is not None else facts.min or 1)
        return self.dims[dim]

    def elements(self, value: ir.Value) -> int:
        return math.prod(map(self.dim, self.program.values[value].shape or ()))

    def bytes_of(self, value: ir.Value) -> int:
        return self.elements(value) * (self.program.values[value].item_bytes or 1)

    def sizes(self, node: ir.Node) -> dict[str, int]:
        """The size of each factor of a node's operands."""
        sizes: dict[str, int] = {}
        for letters, value in zip(rule_of(node).inputs, node.inputs, strict=False):
            shape = self.program.values[value].shape if value is not None and value in self.program.values else None
            for letter, dim in zip(letters or "", shape or (), strict=False):
                if letter != WHOLE:
                    sizes[letter] = max(sizes.get(letter, 1), self.dim(dim))
        return sizes


def _typical(facts: Facts) -> int:
    low = max(facts.min or 1, TYPICAL)
    if facts.max is not None and low >= facts.max:
        return facts.max
    if not facts.divisor:
        return facts.remainder
    size = low + (facts.remainder - low) % facts.divisor
    return size if facts.max is None or size <= facts.max else facts.max
