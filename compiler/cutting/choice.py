"""How one node is cut on its group: which mesh axes cut which factor of its rule, and who decided each.

MatMul `mk,kn->mn` on mesh (2, 4), {m: (0,), k: (1,)}:   inputs [2, 4] and [4, 1], output [2, 1] to be summed over 4
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.layouts.layout import Layout, Mesh
from partc.compiler.ops.rule import WHOLE, Rule
from partc.compiler.program import Group

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Instance:
    """A node on one of its groups: constants and shape arithmetic may run on several."""

    node: ir.Node
    group: Group

    def __hash__(self) -> int:
        """Of the first rank and the number only: a group may have hundreds, and one that is looked up is nearly always the same object."""
        return hash((self.node, self.group[0], len(self.group)))


@dataclass
class Choice:
    """Axes by factor, major first. While `open`, axes that cut nothing yet may be given to factors that have none."""

    rule: Rule
    mesh: Mesh
    axes: dict[str, Axes] = field(default_factory=dict)
    open: bool = True
    why: dict[str, str] = field(default_factory=dict)

    def input(self, k: int) -> Layout | None:
        """The layout that input `k` must have; None for one that is absent or no tensor of known rank."""
        letters = self.rule.inputs[k] if k < len(self.rule.inputs) else None
        return None if letters is None else self._laid_out(letters)

    def output(self, k: int) -> Layout | None:
        """The layout that output `k` has: cut by its own factors, to be reduced over the axes of contracted ones."""
        letters = self.rule.outputs[k] if k < len(self.rule.outputs) else None
        if letters is None:
            return None
        pending = [
            (axis, self.rule.reduce[letter])
            for letter, axes in self.axes.items()
            if letter not in letters and self.rule.reduce.get(letter)
            for axis in axes
        ]
        return self._laid_out(letters, tuple(sorted(pending)))

    def _laid_out(self, letters: str, partial: tuple[tuple[int, str], ...] = ()) -> Layout:
        cuts = tuple(() if letter == WHOLE else self.axes.get(letter, ()) for letter in letters)
        return Layout(self.mesh, cuts, partial)

    def pieces(self, factor: str) -> int:
        """Into how many pieces a factor is cut."""
        return math.prod(self.mesh[axis] for axis in self.axes.get(factor, ()))

    @property
    def cut(self) -> Mapping[str, int]:
        """The factors that are cut, with the number of their pieces."""
        return {letter: self.pieces(letter) for letter, axes in self.axes.items() if axes}

    @property
    def free(self) -> set[int]:
        """Axes that cut nothing."""
        return set(range(len(self.mesh))) - {axis for axes in self.axes.values() for axis in axes}

    def strategy(self) -> str:
        """The cuts of the inputs as the origin's dumps show them: `((2, 4), (4, 1))`."""
        rows = [
            f"({', '.join(str(layout.pieces(dim)) for dim in range(len(layout.cuts)))})"
            for k in range(len(self.rule.inputs))
            if (layout := self.input(k)) is not None
        ]
        return f"({', '.join(rows)})"
