"""The sharding of one node on its group: the mesh axes that shard each factor of its rule, and the source of each decision.

MatMul `mk,kn->mn` on mesh (2, 4), {m: (0,), k: (1,)}:   inputs [2, 4] and [4, 1], output [2, 1] to be summed over 4
Add `ab,ab->ab` on mesh (2, 4), {a: (0,)}, passing (1,):   inputs [2, 1] to be summed over 4, and so the output
Gather `vb,i->ib` on mesh (2, 4), {v: (0, 1), i: (0,)}:    table [8, 1], ids [2], output [2, 1]: rows are pulled: an axis shards both
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
    """A node on one of its groups; constants and shape arithmetic may run on several groups."""

    node: ir.Node
    group: Group

    def __hash__(self) -> int:
        """Hashes only the node and the first rank: groups may have hundreds, and a looked-up group is nearly always the same object."""
        return hash(self.node) ^ self.group[0]


@dataclass(frozen=True)
class ValueOnGroup:
    """A value on one of the groups that have it."""

    value: ir.Value
    group: Group

    def __hash__(self) -> int:
        """Hashes only the value and the first rank, as `NodeOnGroup` does."""
        return hash(self.value) ^ self.group[0]


@dataclass
class NodeSharding:
    """The axes of each factor, major first. While `open`, unused axes may still be given to factors that have none.

    `passing`: axes over which the node's output is a partial sum of its inputs'. Along these axes inputs in `partial` are partial sums;
    inputs in `masked` are replicated, and count as the term of the first rank, with zeros on the others. All other inputs are replicated
    along them.

    `pulls`: whether looked-up rows are pulled even if no axis shards both rows and ids.
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
        """The factor whose rows are pulled from other ranks: its axes also shard ids, or the plan says so; "" if there is none."""
        letter = self.rule.looked_up
        axes = {*self.axes.get(letter, ())}
        others = {axis for other, own in self.axes.items() if other not in (letter, self.rule.dealt) for axis in own}
        return letter if axes and (self.pulls or axes & others) else ""

    def shared_with(self, letter: str) -> set[int]:
        """Mesh axes this factor may share with another: in a lookup, rows and ids may be sharded over the same axis; so may a joined dim
        and its parts.
        """
        if letter in self.rule.joined:
            joined, *parts = self.rule.joined
            rest = [part for part in parts if part != letter]
            apart = {axis for part in rest for axis in self.axes.get(part, ())}
            return apart if letter == joined else {*self.axes.get(joined, ())} - apart
        row, own = self.rule.looked_up, self.rule.ids
        ids = {axis for one in own for axis in self.axes.get(one, ())}
        if letter == row:
            return ids
        return {*self.axes.get(row, ())} - ids if letter in own else set()

    def input(self, k: int) -> Layout | None:
        """Returns the layout of input `k`; None for an input that is absent or not a tensor of known rank."""
        letters = self.rule.inputs[k] if k < len(self.rule.inputs) else None
        return None if letters is None else self._laid_out(letters, self._passed if k in self.partial else ())

    def masked_layout(self, k: int) -> Layout:
        """Returns the layout of the masked input `k`, whose values only the first rank keeps."""
        letters = self.rule.inputs[k]
        assert letters is not None
        return self._laid_out(letters, self._passed)

    def output(self, k: int) -> Layout | None:
        """Returns the layout of output `k`: sharded by its factors, and partial over the axes of contracted factors."""
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
        """Returns this choice for outputs with the partial layout of `terms`: over these axes all operands are unsharded; None if the node
        is sharded over them.

        The caller still sets which inputs are `partial`, and which are `masked`.
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
        """Returns this sharding with partial sums reduced as soon as they are made."""
        return replace(self, passing=(), partial=frozenset(), masked=frozenset()) if self.passing else self

    @property
    def _passed(self) -> tuple[tuple[int, str], ...]:
        return tuple((axis, "sum") for axis in self.passing)

    def _laid_out(self, letters: str, partial: tuple[tuple[int, str], ...] = ()) -> Layout:
        return layout_of(self.mesh, tuple([self.axes.get(letter, ()) for letter in letters]), partial)

    def num_shards(self, factor: str) -> int:
        """Returns the number of shards of a factor."""
        found = 1
        for axis in self.axes.get(factor, ()):
            found *= self.mesh[axis]
        return found

    @property
    def cut(self) -> Mapping[str, int]:
        """Maps each sharded factor to its number of shards."""
        return {letter: self.num_shards(letter) for letter, axes in self.axes.items() if axes}

    @property
    def free(self) -> set[int]:
        """The axes that shard nothing."""
        return set(range(len(self.mesh))) - {axis for axes in (*self.axes.values(), self.passing) for axis in axes}

    def strategy(self) -> str:
        """Returns the numbers of shards of the inputs' dims, as the dumps show them: `((2, 4), (4, 1))`."""
        rows = [
            f"({', '.join(map(str, layout.shards))})"
            for k in range(len(self.rule.inputs))
            if (layout := self.input(k)) is not None
        ]
        return f"({', '.join(rows)})"


Operand = tuple[NodeOnGroup, int]


@dataclass(frozen=True)
class StoredUnit:
    """A module whose parameters ranks store in shards and gather in one message, and the rule that requires it."""

    name: str
    rule: StoredRule


@dataclass
class Pinned:
    """Layouts set by the plan or the model: of a region's operands, of inputs and weights that arrive in a group, of outputs.

    `stored`: the layout in which a group stores a weight, whatever layouts its readers use; a reader that nothing else shards uses it too.
    `units`: maps each parameter that ranks store in shards to its unit; it does not affect how ops compute.
    """

    inputs: dict[Operand, tuple[Layout, str]] = field(default_factory=dict)
    outputs: dict[Operand, tuple[Layout, str]] = field(default_factory=dict)
    arriving: dict[ValueOnGroup, tuple[Layout, str]] = field(default_factory=dict)
    stored: dict[ValueOnGroup, tuple[Layout, str]] = field(default_factory=dict)
    units: dict[ir.Value, StoredUnit] = field(default_factory=dict)
