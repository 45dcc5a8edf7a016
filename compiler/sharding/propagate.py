"""Propagates given shardings to every node, forward and backward through the graph until nothing changes.

A node first takes the shardings given for its own operands and results. Then it takes the sharding in which an operand arrives, or that a
reader wants, wherever its rule allows it: the factor of that dim gets those axes. The plan's shardings never change; a derived sharding,
once set, stays. If two neighbours want different shardings, the one whose size grows faster with a symbol is heard first (attention scores,
`[batch, heads, seq, seq]`, before values), then the one with more bytes at typical sizes, at a tie the earlier operand. Inputs are heard
before outputs in every round. A sharding by which the dims are not proven to be divisible is not derived: the value is resharded there
instead. An axis shards one factor of a node; only looked-up rows may share axes with ids that arrive sharded: pulling the rows of n ids
moves (P-1)/P n (8 + row) bytes a rank at most, and gathering ids and reducing partial sums moves P times as many.

A value that goes to another group of as many ranks propagates its sharding as on its own group: so data parallel stages keep it. An
exception is a parameter that other ranks serve: its sharding there has no influence on how its readers compute. The layout in which a plan
stores a parameter is heard last, when no other wish can be taken: a parameter stored in shards over data parallel ranks is gathered by its
readers, whose records these ranks share; one stored in shards over ranks that would otherwise compute the same is computed in shards.

The result depends only on the graph and the given shardings, not on the order of the rules. A node would refuse again what it has refused,
so it is asked again only if a neighbour has changed; a node that looks up rows also if it has changed itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.ir.choice import Axes, NodeOnGroup, NodeSharding, Operand, Pinned, ValueOnGroup
from partc.compiler.ir.graph import PINNED
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, Mesh, layout_of
from partc.compiler.ops.rule import WHOLE


@dataclass(frozen=True)
class Vote:
    """A neighbour's wish: a factor sharded by axes of a mesh, the weight of its value (see `Propagation.weigh`), and the neighbour."""

    letter: str
    mesh: Mesh
    axes: Axes
    weight: tuple[int, float]
    why: str
    arrives: bool = False
    """Whether the operand arrives in this sharding, or it was given: only then may looked-up rows share the axes and be pulled."""


@dataclass
class Propagation:
    """The instances of the graph's nodes in order with their choices, and the facts for hearing their neighbours.

    `weigh`: returns how fast a value's size grows with a symbol, and its bytes at typical sizes. `divides`: returns whether a factor of an
    instance is proven to be divisible by a number of shards.
    """

    instances: Sequence[NodeOnGroup]
    choices: Mapping[NodeOnGroup, NodeSharding]
    pinned: Pinned
    paths: Mapping[ir.Node, str]
    weigh: Callable[[ir.Value], tuple[int, int]]
    divides: Callable[[NodeOnGroup, str, int], bool]
    readers: dict[tuple[ir.Value, int], list[Operand]] = field(default_factory=dict)
    """Maps a value and the size of a group to the operands that read it."""
    places: dict[ir.Node, list[int]] = field(default_factory=dict)
    """Maps each node to the indices of its instances in `instances`."""
    hears_stored: bool = False
    """Whether the layouts in which parameters are stored are taken into account."""

    def __post_init__(self) -> None:
        for place, instance in enumerate(self.instances):
            self.places.setdefault(instance.node, []).append(place)
            for k, value in enumerate(instance.node.inputs):
                if value is not None:
                    self.readers.setdefault((value, len(instance.group)), []).append((instance, k))

    def run(self) -> None:
        """Extends the open choices until no neighbour's wish can be taken any more."""
        for instance in dict.fromkeys(instance for instance, _ in (*self.pinned.inputs, *self.pinned.outputs)):
            self._hear(instance, self._from_plan)
        count = len(self.instances)
        by_inputs, by_outputs = bytearray(b"1" * count), bytearray(b"1" * count)
        """Flags of the instances that are to be asked for the wishes of their inputs, or of their outputs."""
        self._settle(by_inputs, by_outputs)
        waiting = [place for place, one in enumerate(self.instances) if self.choices[one].rule.joined]
        while changed := (
            [place for place in waiting if self._join(self.instances[place], alone=False)]
            or [place for place in waiting if self._join(self.instances[place], alone=True)]
        ):
            for place in changed:
                self._mark(place, self.instances[place], by_inputs, by_outputs)
            self._settle(by_inputs, by_outputs)
        if dealt := [place for place, one in enumerate(self.instances) if self.choices[one].rule.dealt]:
            for place in dealt:
                self._deal(self.choices[self.instances[place]])
                self._mark(place, self.instances[place], by_inputs, by_outputs)
            self._settle(by_inputs, by_outputs)
        if readers := [use.node for there in self.pinned.stored for use in there.value.uses()]:
            self.hears_stored = True
            for node in readers:
                for place in self.places.get(node, ()):
                    by_inputs[place] = True
            self._settle(by_inputs, by_outputs)

    @staticmethod
    def _deal(choice: NodeSharding) -> None:
        """Shards rows that are with their experts' ranks along the axes of the experts, and of the rows that are sent there."""
        owners = choice.axes.get(choice.rule.looked_up, ())
        rows = [axis for letter in choice.rule.ids for axis in choice.axes.get(letter, ())]
        choice.axes[choice.rule.dealt] = tuple(dict.fromkeys((*rows, *owners)))
        choice.why[choice.rule.dealt] = choice.why.get(choice.rule.looked_up, "")

    def _join(self, instance: NodeOnGroup, *, alone: bool) -> bool:
        """Shards a joined dim along the axes of its tokens, then of its records, or the records as it is sharded.

        Returns whether the choice changed. `alone`: also if no axis shards the records.
        """
        choice = self.choices[instance]
        joined, tokens, records = choice.rule.joined
        first, made = choice.axes.get(tokens, ()), choice.axes.get(joined, ())
        rest = choice.axes.get(records, ()) or tuple(axis for axis in made if axis not in first)
        if not first or not self.divides(instance, records, math.prod([choice.mesh[axis] for axis in rest])):
            rest = ()
        axes = {joined: (*first, *rest), records: rest}
        if not (rest or alone) or all(choice.axes.get(letter) == axes[letter] for letter in axes):
            return False
        choice.axes |= axes
        choice.why |= dict.fromkeys(axes, choice.why.get(tokens, ""))
        return True

    def _settle(self, by_inputs: bytearray, by_outputs: bytearray) -> None:
        """Sweeps until no flagged instance takes a wish."""
        count, changed = len(self.instances), True
        while changed:
            changed = self._sweep(range(count), by_inputs, (by_inputs, by_outputs), self._from_inputs)
            if not changed:
                changed = self._sweep(range(count)[::-1], by_outputs, (by_inputs, by_outputs), self._from_outputs)

    def _sweep(
        self,
        places: range,
        asked: bytearray,
        again: tuple[bytearray, bytearray],
        neighbours: Callable[[NodeOnGroup], Iterator[Vote]],
    ) -> bool:
        """Updates the instances flagged in `asked`, and flags in `again` the neighbours of those that changed; returns whether any did."""
        changed = False
        for place in places:
            if asked[place]:
                asked[place] = False
                instance = self.instances[place]
                if self._hear(instance, neighbours):
                    changed = True
                    self._mark(place, instance, *again)
        return changed

    def _mark(self, place: int, instance: NodeOnGroup, by_inputs: bytearray, by_outputs: bytearray) -> None:
        """Flags the neighbours of an instance that has changed."""
        for value in instance.node.outputs:
            for reader, _ in self.readers.get((value, len(instance.group)), ()):
                for other in self.places[reader.node]:
                    by_inputs[other] = True
        producers = [value.producer() for value in instance.node.inputs if value is not None]
        for producer in producers:
            for other in self.places.get(producer, ()) if producer is not None else ():
                by_outputs[other] = True
        if self.choices[instance].rule.looked_up:
            by_inputs[place] = by_outputs[place] = True

    def layout_of(self, value: ir.Value, group: Group) -> tuple[Layout, str] | None:
        """Returns the current layout of a value on `group`, or on another of its groups with equal size; None if it is not yet decided.

        Also returns what decided it: a line without its folder, which differs by machine, or a neighbour's path.
        """
        producer = value.producer()
        there = ValueOnGroup(value, group)
        if arriving := self.pinned.arriving.get(there) or (
            self.pinned.stored.get(there) if self.hears_stored else None
        ):
            return arriving[0], PurePath(arriving[1]).name
        made = [self.instances[place] for place in self.places.get(producer, ())] if producer is not None else []
        instance = next((one for one in made if one.group == group), None)
        if producer is None or (instance is None and PINNED in producer.meta):
            return None
        instance = instance or next((one for one in made if len(one.group) == len(group)), None)
        if instance is None:
            return None
        k = value.index()
        assert k is not None
        if wanted := self.pinned.outputs.get((instance, k)) if self.pinned.outputs else None:
            return wanted[0], PurePath(wanted[1]).name
        layout = self.choices[instance].output(k)
        return None if layout is None else (layout_of(layout.mesh, layout.cuts), self.paths[producer])

    def _hear(self, instance: NodeOnGroup, neighbours: Callable[[NodeOnGroup], Iterator[Vote]]) -> bool:
        choice = self.choices[instance]
        if not choice.open:
            return False
        votes = sorted(neighbours(instance), key=lambda vote: vote.weight, reverse=True)
        taken = [self._take(instance, choice, vote) for vote in votes]
        return any(taken)

    def _take(self, instance: NodeOnGroup, choice: NodeSharding, vote: Vote) -> bool:
        if vote.letter in choice.axes or vote.letter not in choice.rule.factors:
            return False
        if choice.axes:
            shares = vote.arrives or vote.letter in choice.rule.joined
            allowed = choice.free | (choice.shared_with(vote.letter) if shares else set())
            if vote.mesh != choice.mesh or not allowed.issuperset(vote.axes):
                return False
        if not self.divides(instance, vote.letter, math.prod([vote.mesh[axis] for axis in vote.axes])):
            return False
        choice.mesh = vote.mesh
        choice.axes[vote.letter] = vote.axes
        choice.why[vote.letter] = vote.why
        return True

    def _from_plan(self, instance: NodeOnGroup) -> Iterator[Vote]:
        rule = self.choices[instance].rule
        for letters, given in ((rule.inputs, self.pinned.inputs), (rule.outputs, self.pinned.outputs)):
            for k, operand in enumerate(letters):
                if (found := given.get((instance, k))) and any(found[0].cuts):
                    yield from self._votes(operand, found, (1, math.inf), arrives=True)

    def _from_inputs(self, instance: NodeOnGroup) -> Iterator[Vote]:
        for k, value in enumerate(instance.node.inputs):
            if value is None or (self.pinned.inputs and (instance, k) in self.pinned.inputs):
                continue
            found = self.layout_of(value, instance.group)
            if found is not None and any(found[0].cuts):
                yield from self._votes(self.choices[instance].rule.inputs[k], found, self.weigh(value), arrives=True)

    def _from_outputs(self, instance: NodeOnGroup) -> Iterator[Vote]:
        rule = self.choices[instance].rule
        for k, value in enumerate(instance.node.outputs):
            for reader, operand in self.readers.get((value, len(instance.group)), ()):
                wanted = self.pinned.inputs.get((reader, operand)) if self.pinned.inputs else None
                layout = wanted[0] if wanted else self.choices[reader].input(operand)
                if layout is not None and any(layout.cuts):
                    yield from self._votes(rule.outputs[k], (layout, self.paths[reader.node]), self.weigh(value))

    @staticmethod
    def _votes(
        letters: str | None, found: tuple[Layout, str], weight: tuple[int, float], *, arrives: bool = False
    ) -> Iterator[Vote]:
        layout, why = found
        if letters is None or len(letters) != len(layout.cuts):
            return
        for letter, axes in zip(letters, layout.cuts, strict=True):
            if axes and letter != WHOLE:
                yield Vote(letter, layout.mesh, axes, weight, why, arrives)
