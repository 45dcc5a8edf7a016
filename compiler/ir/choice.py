"""The sharding of one node on its group: the mesh axes that shard each factor of its rule, and who decided each.

MatMul `mk,kn->mn` on mesh (2, 4), {m: (0,), k: (1,)}:   inputs [2, 4] and [4, 1], output [2, 1] to be summed over 4
Add `ab,ab->ab` on mesh (2, 4), {a: (0,)}, passing (1,):   inputs [2, 1] to be summed over 4, and so the output
Gather `vb,i->ib` on mesh (2, 4), {v: (0, 1), i: (0,)}:    table [8, 1], ids [2], output [2, 1]: rows are pulled, for an axis cuts both
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, Mesh, layout_of
from partc.compiler.layout.mesh import on_common_mesh
from partc.compiler.plan.stored import StoredRule

if TYPE_CHECKING:
    from partc.compiler.ops.rule import Rule

Axes = tuple[int, ...]


@dataclass(frozen=True)
class NodeOnGroup:
    """A node on one of its groups: constants and shape arithmetic may run on several."""

    node: ir.Node
    group: Group

    def __hash__(self) -> int:
        """Hashes only the first rank: groups may have hundreds, and a looked-up group is nearly always the same object."""
        return hash(self.node) ^ self.group[0]


@dataclass(frozen=True)
class ValueOnGroup:
    """A value on one of the groups that have it."""

    value: ir.Value
    group: Group

    def __hash__(self) -> int:
        """Hashes only the first rank, as `NodeOnGroup` does."""
        return hash(self.value) ^ self.group[0]


@dataclass
class NodeSharding:
    """Axes by factor, major first. While `open`, axes that cut nothing yet may be given to factors that have none.

    `passing`: axes over which the node is given terms of a sum, and gives such: those of inputs `partial` are there, inputs `masked` are
    whole and are the term of the first rank along the axes, zeros being those of the others. Of its other inputs every rank has all.

    `pulls`: rows that are looked up are pulled also where no axis cuts both them and ids.
    """

    rule: Rule
    mesh: Mesh
    axes: dict[str, Axes] = field(default_factory=dict)
    open: bool = True
    why: dict[str, str] = field(default_factory=dict)
    passing: Axes = ()
    partial: frozenset[int] = frozenset()
    masked: frozenset[int] = frozenset()
    pulls: bool = False

    @property
    def pulled(self) -> str:
        """The factor whose rows are pulled from other ranks, "" where none is: its axes cut ids, too, or the plan says so."""
        letter = self.rule.looked_up
        axes = {*self.axes.get(letter, ())}
        others = {axis for other, own in self.axes.items() if other not in (letter, self.rule.dealt) for axis in own}
        return letter if axes and (self.pulls or axes & others) else ""

    def shared_with(self, letter: str) -> set[int]:
        """Mesh axes this factor may share with another: in a lookup, rows and ids may be sharded over the same axis."""
        row, own = self.rule.looked_up, self.rule.ids
        ids = {axis for one in own for axis in self.axes.get(one, ())}
        if letter == row:
            return ids
        return {*self.axes.get(row, ())} - ids if letter in own else set()

    def input(self, k: int) -> Layout | None:
        """The layout that input `k` must have; None for one that is absent or no tensor of known rank."""
        letters = self.rule.inputs[k] if k < len(self.rule.inputs) else None
        return None if letters is None else self._laid_out(letters, self._passed if k in self.partial else ())

    def masked_layout(self, k: int) -> Layout:
        """The layout of what becomes of input `k`, which is kept by the first of the ranks."""
        letters = self.rule.inputs[k]
        assert letters is not None
        return self._laid_out(letters, self._passed)

    def output(self, k: int) -> Layout | None:
        """The layout that output `k` has: cut by its own factors, to be reduced over the axes of contracted ones."""
        letters = self.rule.outputs[k] if k < len(self.rule.outputs) else None
        if letters is None:
            return None
        if not self.rule.reduce and not self.passing:
            return self._laid_out(letters)
        pending = [
            (axis, self.rule.reduce[letter])
            for letter, axes in self.axes.items()
            if letter not in letters and self.rule.reduce.get(letter) and letter != self.pulled
            for axis in axes
        ]
        return self._laid_out(letters, tuple(sorted((*pending, *self._passed))))

    def giving(self, terms: Layout) -> NodeSharding | None:
        """This choice, with all inputs and outputs whole along axes of its own that are those of `terms`; None where these cut it.

        What is left is to say which inputs are `partial`, and which are `masked`.
        """
        if self.pulled:
            return None
        here = layout_of(self.mesh, tuple(self.axes.values()))
        common = on_common_mesh(here, layout_of(terms.mesh, (), terms.partial))
        if common is None:
            return None
        passing = tuple(axis for axis, _ in common[1].partial)
        if {axis for axes in common[0].cuts for axis in axes} & {*passing}:
            return None
        return replace(
            self, mesh=common[0].mesh, axes=dict(zip(self.axes, common[0].cuts, strict=True)), passing=passing
        )

    def settled(self) -> NodeSharding:
        """This sharding with partial sums reduced as soon as they are made."""
        return replace(self, passing=(), partial=frozenset(), masked=frozenset()) if self.passing else self

    @property
    def _passed(self) -> tuple[tuple[int, str], ...]:
        return tuple((axis, "sum") for axis in self.passing)

    def _laid_out(self, letters: str, partial: tuple[tuple[int, str], ...] = ()) -> Layout:
        return layout_of(self.mesh, tuple([self.axes.get(letter, ()) for letter in letters]), partial)

    def num_shards(self, factor: str) -> int:
        """Into how many shards a factor is cut."""
        found = 1
        for axis in self.axes.get(factor, ()):
            found *= self.mesh[axis]
        return found

    @property
    def cut(self) -> Mapping[str, int]:
        """The factors that are cut, with the number of their shards."""
        return {letter: self.num_shards(letter) for letter, axes in self.axes.items() if axes}

    @property
    def free(self) -> set[int]:
        """Axes that cut nothing."""
        return set(range(len(self.mesh))) - {axis for axes in (*self.axes.values(), self.passing) for axis in axes}

    def strategy(self) -> str:
        """The numbers of shards of the inputs' dims, as the dumps show them: `((2, 4), (4, 1))`."""
        rows = [
            f"({', '.join(map(str, layout.shards))})"
            for k in range(len(self.rule.inputs))
            if (layout := self.input(k)) is not None
        ]
        return f"({', '.join(rows)})"


Operand = tuple[NodeOnGroup, int]


@dataclass(frozen=True)
class StoredUnit:
    """A module whose parameters ranks store in shards and gather in one message, and the rule that says so."""

    name: str
    rule: StoredRule


@dataclass
class Pinned:
    """Layouts that the plan or the model gives: of operands inside of a region, of inputs and weights that arrive in a group, of outputs.

    `stored` is the layout in which a group keeps a weight, whichever layouts its readers take: they take it where nothing else shards them.
    `units`: by parameter the unit with which ranks store it in shards of what they read; it says nothing of how ops compute.
    """

    inputs: dict[Operand, tuple[Layout, str]] = field(default_factory=dict)
    outputs: dict[Operand, tuple[Layout, str]] = field(default_factory=dict)
    arriving: dict[ValueOnGroup, tuple[Layout, str]] = field(default_factory=dict)
    stored: dict[ValueOnGroup, tuple[Layout, str]] = field(default_factory=dict)
    units: dict[ir.Value, StoredUnit] = field(default_factory=dict)
