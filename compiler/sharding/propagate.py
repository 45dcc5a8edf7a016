"""From the cuts that are given to a cut of every node, forward and backward through the graph until nothing changes.

A node first hears what is given of its own operands and results. Then it takes the cut of an operand that arrives cut, or that its
reader wants cut, wherever its rule allows it: the factor of that dim gets those axes. What the plan gave is never changed; what was
derived first stays; where two neighbours ask for different cuts, the one with more bytes is heard first, at a tie the earlier
operand. Inputs are heard before outputs in every round. A cut that the dims are not proven to be divisible by is not derived: the
value is resharded there instead. An axis cuts one factor of a node; only rows that are looked up may have those of ids that arrive cut: to
pull n ids' rows moves (P-1)/P n (8 + row) bytes a rank at most, and to gather ids and reduce terms P times as many.

A value that goes to another group of as many ranks is asked for, and offered, as on its own: data parallel stages stay so. But for a
parameter that other ranks serve: how it is cut there says nothing of how they compute.

The result depends on the graph and on the given cuts alone, not on the order in which rules are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.ir.choice import Axes, NodeOnGroup, NodeSharding, Operand, Pinned
from partc.compiler.ir.graph import PINNED
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, Mesh
from partc.compiler.ops.rule import WHOLE


@dataclass(frozen=True)
class Vote:
    """A neighbour's wish: a factor cut by axes of a mesh, its weight in bytes, and who wishes it."""

    letter: str
    mesh: Mesh
    axes: Axes
    weight: float
    why: str
    arrives: bool = False
    """Whether the operand arrives so, or is given so: then rows that are looked up may be pulled, if the same axes cut both."""


@dataclass
class Propagation:
    """The graph's instances in order with their choices, and what is needed to hear their neighbours.

    `weigh` gives a value's bytes; `divides` says whether a factor of an instance is proven to be divisible by so many shards.
    """

    instances: Sequence[NodeOnGroup]
    choices: Mapping[NodeOnGroup, NodeSharding]
    given: Pinned
    paths: Mapping[ir.Node, str]
    weigh: Callable[[ir.Value], float]
    divides: Callable[[NodeOnGroup, str, int], bool]
    readers: dict[tuple[ir.Value, int], list[Operand]] = field(default_factory=dict)
    """Per value and size of group the operands that read it."""
    groups: dict[ir.Node, list[Group]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for instance in self.instances:
            self.groups.setdefault(instance.node, []).append(instance.group)
            for k, value in enumerate(instance.node.inputs):
                if value is not None:
                    self.readers.setdefault((value, len(instance.group)), []).append((instance, k))

    def run(self) -> None:
        """Extends the open choices until no neighbour's wish can be taken any more."""
        for instance in self.instances:
            self._hear(instance, self._given)
        changed = True
        while changed:
            changed = False
            for instance in self.instances:
                changed |= self._hear(instance, self._from_inputs)
            if changed:
                continue
            for instance in reversed(self.instances):
                changed |= self._hear(instance, self._from_outputs)

    def layout_of(self, value: ir.Value, group: Group) -> tuple[Layout, str] | None:
        """The current layout of a value on `group`, or on another of its groups with equal size; None if not yet decided.

        Beside it what decided so: a line without its folder, which differs by machine, or a neighbour's path.
        """
        if arriving := self.given.arriving.get((value, group)):
            return arriving[0], PurePath(arriving[1]).name
        producer = value.producer()
        if producer is None:
            return None
        groups = self.groups.get(producer, [])
        if PINNED in producer.meta and group not in groups:
            return None
        like = group if group in groups else next((other for other in groups if len(other) == len(group)), group)
        instance = NodeOnGroup(producer, like)
        choice = self.choices.get(instance)
        k = producer.outputs.index(value)
        if choice is None:
            return None
        if wanted := self.given.outputs.get((instance, k)):
            return wanted[0], PurePath(wanted[1]).name
        layout = choice.output(k)
        return None if layout is None else (Layout(layout.mesh, layout.cuts), self.paths[producer])

    def _hear(self, instance: NodeOnGroup, neighbours: Callable[[NodeOnGroup], Iterator[Vote]]) -> bool:
        choice = self.choices[instance]
        if not choice.open:
            return False
        votes = sorted(neighbours(instance), key=lambda vote: -vote.weight)
        taken = [self._take(instance, choice, vote) for vote in votes]
        return any(taken)

    def _take(self, instance: NodeOnGroup, choice: NodeSharding, vote: Vote) -> bool:
        if vote.letter in choice.axes or vote.letter not in choice.rule.factors:
            return False
        if vote.mesh != choice.mesh:
            if choice.axes:
                return False
            choice.mesh = vote.mesh
        shards = NodeSharding(choice.rule, choice.mesh, {vote.letter: vote.axes}).num_shards(vote.letter)
        allowed = choice.free | (choice.shared_with(vote.letter) if vote.arrives else set())
        if not set(vote.axes) <= allowed or not self.divides(instance, vote.letter, shards):
            return False
        choice.axes[vote.letter] = vote.axes
        choice.why[vote.letter] = vote.why
        return True

    def _given(self, instance: NodeOnGroup) -> Iterator[Vote]:
        rule = self.choices[instance].rule
        for letters, given in ((rule.inputs, self.given.inputs), (rule.outputs, self.given.outputs)):
            for k, operand in enumerate(letters):
                if found := given.get((instance, k)):
                    yield from self._votes(operand, found, float("inf"), arrives=True)

    def _from_inputs(self, instance: NodeOnGroup) -> Iterator[Vote]:
        for k, value in enumerate(instance.node.inputs):
            if value is None:
                continue
            if (instance, k) not in self.given.inputs and (found := self.layout_of(value, instance.group)):
                yield from self._votes(self.choices[instance].rule.inputs[k], found, self.weigh(value), arrives=True)

    def _from_outputs(self, instance: NodeOnGroup) -> Iterator[Vote]:
        rule = self.choices[instance].rule
        for k, value in enumerate(instance.node.outputs):
            for reader, operand in self.readers.get((value, len(instance.group)), ()):
                wanted = self.given.inputs.get((reader, operand))
                layout = wanted[0] if wanted else self.choices[reader].input(operand)
                if layout is not None:
                    yield from self._votes(rule.outputs[k], (layout, self.paths[reader.node]), self.weigh(value))

    @staticmethod
    def _votes(
        letters: str | None, found: tuple[Layout, str], weight: float, *, arrives: bool = False
    ) -> Iterator[Vote]:
        layout, why = found
        if letters is None or len(letters) != len(layout.cuts):
            return
        for letter, axes in zip(letters, layout.cuts, strict=True):
            if axes and letter != WHOLE:
                yield Vote(letter, layout.mesh, axes, weight, why, arrives)
