"""Recompute: forward ops that the plan names are repeated in the backward task, and their results are not saved for it.

    forward     h -> up -> a -> Gelu -> b -> down -> y        keeps h, a, b
    backward    reads h, a, b

    recompute: ["layers.*"], all of that being layers.0
    forward     h -> up -> a -> Gelu -> b -> down -> y        keeps h
    backward    h -> up -> a.recomputed -> Gelu -> b.recomputed; reads h, a.recomputed, b.recomputed

A region, such as one layer, is repeated as a whole right before its backward pass, but only the ops whose results that reads, directly or
not: not `down`. The values that the region reads from outside are saved, as are its values that are read outside: by other regions, other
stages, nodes that the plan does not name. So layers are repeated one by one, each from its own inputs.

Collectives are repeated too, on all their ranks, since their results are as large as the values that are not saved. Messages, rows sent to
their experts and back, and ops that draw random numbers are not repeated: their results are saved. Masks of a dropout depend only on places
and the step, so they are repeated with the same result. Updated statistics, outputs, and values that other stages read are those of the
forward task.

With microbatches an op that depends on none of them (a weight's Transpose) runs once for all; in an undivided batch it is repeated with its
region, as each session would do within a product.

Repeated ops belong to B, and to W if only W reads them (`phases.split_backward`, which runs later).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.autodiff.reach import flowing
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Comm, Compute, Event, Op, TaskKind, Value, exchanged, with_values
from partc.compiler.matching import Region, matched_nodes, recomputed
from partc.compiler.ops.registry import draws
from partc.compiler.pipelines.phases import ONCE, Label, Labels, Phase, Place, Unit
from partc.compiler.plan.pipeline import RecomputeRule
from partc.runtime.artifact.format import RECV, RETURN, ROUTE, SEND

_BACKWARD = (Phase.BACKWARD, Phase.WEIGHT)
_AGAIN = "recomputed"
Own: TypeAlias = tuple[Region, int]
"""A region, and the stage."""
Item: TypeAlias = tuple[Place, ...]
"""An op, or an event with its place in each of its programs."""
There: TypeAlias = tuple[int, Value]
"""A unit, and a value in it."""


def recompute(program: Lowered, units: Sequence[Unit], labels: Labels) -> tuple[Lowered, list[Unit], Labels]:
    """Returns the units and labels with the plan's nodes recomputed; the program gets events, and warnings of patterns without effect."""
    nodes, _ = recomputed(program)
    if not nodes:
        return program, list(units), labels
    work = _Recompute(program, units, labels, nodes)
    work.find()
    program = replace(program, warnings=(*program.warnings, *work.told()))
    if not work.again:
        return program, list(units), labels
    made, found = work.write()
    return replace(program, events=tuple(work.events)), made, found


def undivided(program: Lowered, units: Sequence[Unit]) -> Lowered:
    """Returns the program of an undivided batch, whose ranks have their units' ops."""
    of_rank = {rank: unit.program for unit in units for rank in unit.ranks}
    parts = [replace(part, steps=of_rank[part.rank].steps) for part in program.parts]
    return replace(program, parts=tuple(parts))


@dataclass
class _Recompute:
    program: Lowered
    units: Sequence[Unit]
    labels: Labels
    nodes: Mapping[ir.Node, tuple[Region, RecomputeRule]]
    again: dict[Own, list[Item]] = field(default_factory=dict)
    """The ops that are repeated, in order."""
    instead: dict[There, Own] = field(default_factory=dict)
    """Maps each unit and value to the region that reads the recomputed value instead of the forward task's."""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.repeated: dict[Value, Value] = {}
        self.order = self.in_step()
        self.rules = dict(self.nodes.values())
        self.written: tuple[list[list[Op]], Labels] = ([[] for _ in self.units], Labels([[] for _ in self.units]))
        self.tags: dict[tuple[int, bool], int] = {}
        self.listed = {event.tag: event for event in self.program.events}

    def in_step(self) -> list[Item]:
        """The ops of all units, forward ones first, sorted by their depth: so all units repeat a region together.

        An op has one depth on all units, the largest: a unit with more ops, such as the one that adds up the loss, has the same order.
        """
        depths = self.depths({})
        same: dict[int, int] = {}
        for item, depth in depths.items():
            same[id(self.first(item))] = max(depth, same.get(id(self.first(item)), 0))
        depths = self.depths(same)
        return sorted(depths, key=lambda item: (self.first(item).task is not TaskKind.FORWARD, depths[item]))

    def depths(self, least: Mapping[int, int]) -> dict[Item, int]:
        """Maps each op to its depth: more than that of the ops before it on its units, and at least that in `least`, by identity."""
        times = [0] * len(self.units)
        depths: dict[Item, int] = {}
        for item in self.labels.order:
            time = max(1 + max(times[unit] for unit, _ in item), least.get(id(self.first(item)), 0))
            for unit, _ in item:
                times[unit] = time
            depths[item] = time
        return depths

    def label(self, item: Item) -> Label:
        unit, at = item[0]
        return self.labels.steps[unit][at]

    def first(self, item: Item) -> Op:
        unit, at = item[0]
        return self.units[unit].steps[at]

    def steps(self, item: Item) -> list[tuple[int, Op]]:
        return [(unit, self.units[unit].steps[at]) for unit, at in item]

    def reads(self, item: Item) -> list[There]:
        return [(unit, value) for unit, step in self.steps(item) for value in step.reads]

    def makes(self, item: Item) -> list[There]:
        return [(unit, value) for unit, step in self.steps(item) for value in step.makes]

    def new(self, there: There, own: Own | None) -> Value | None:
        """Returns the value that a reader in a region reads instead of the forward task's; None if it reads the latter."""
        return self.again_of(there[1]) if own is not None and self.instead.get(there) == own else None

    def again_of(self, value: Value) -> Value:
        """Returns `h.recomputed` for `h`, the same value on all ranks."""
        if value not in self.repeated:
            self.repeated[value] = value.derived(f".{_AGAIN}")
        return self.repeated[value]

    def of_node(self, item: Item) -> Own | None:
        """Returns the region of an op by its model node, within the op's stage."""
        step = self.first(item)
        found = self.nodes.get(step.source) if isinstance(step, Compute) else None
        return None if found is None else (found[0], self.label(item).stage)

    def owners(self) -> dict[Item, Own]:
        """Maps every forward op that may be repeated to its region; an op without a model node belongs to its operands' region."""
        owners: dict[Item, Own] = {}
        owner_of: dict[There, Own | None] = {}
        for item in self.order:
            label, step = self.label(item), self.first(item)
            if label.phase is not Phase.FORWARD:
                continue
            own = self.of_node(item)
            if not isinstance(step, Compute) or step.source not in self.program.paths:
                read = {owner_of[value] for value in self.reads(item) if value in owner_of}
                (own,) = read if len(read) == 1 else (None,)
            owner_of |= dict.fromkeys(self.makes(item), own)
            if own is not None and own[1] == label.stage and _may_repeat(step):
                owners[item] = own
        return owners

    def find(self) -> None:
        """Fills `again` and `instead`."""
        owners = self.owners()
        readers: dict[There, set[Own | None]] = {}
        for item in reversed(self.order):
            phase = self.label(item).phase
            if phase in _BACKWARD:
                reader = self.of_node(item)
            elif (reader := owners.get(item) or self.once(item, readers)) is not None:
                wanted = [value for value in self.makes(item) if readers.get(value) == {reader}]
                if not wanted:
                    continue
                self.again.setdefault(reader, []).append(item)
                self.instead |= dict.fromkeys(wanted, reader)
            else:
                continue
            for value in self.reads(item):
                readers.setdefault(value, set()).add(reader)
        self.again = {own: items[::-1] for own, items in self.again.items()}

    @cached_property
    def backward(self) -> set[There]:
        """The results of ops of the backward pass, which come after the repeated ops."""
        made = (self.makes(item) for item in self.order if self.first(item).task is not TaskKind.FORWARD)
        return {value for some in made for value in some}

    def once(self, item: Item, readers: Mapping[There, set[Own | None]]) -> Own | None:
        """Returns the only region that reads an op outside of microbatches; None if several do, or the backward pass reads it elsewhere."""
        assert self.program.plan.pipeline is not None
        own = self.of_node(item)
        if (
            own is None
            or not self.backward.isdisjoint(self.reads(item))
            or self.label(item) != ONCE
            or self.program.plan.pipeline.microbatches > 1
        ):
            return None
        found = {reader for value in self.makes(item) for reader in readers.get(value, ())}
        (reader,) = found if len(found) == 1 else (None,)
        return reader if reader is not None and reader[0] == own[0] and _may_repeat(self.first(item)) else None

    def write(self) -> tuple[list[Unit], Labels]:
        """Returns the units with the repeated ops before the first backward ops of their region, and their labels."""
        unread = self.unread()
        waiting = dict(self.again)
        for item in self.order:
            label = self.label(item)
            own = self.of_node(item) if label.phase in _BACKWARD else None
            if own is not None:
                for one in waiting.pop(own, ()):
                    self.put(one, Label(Phase.BACKWARD, own[1]), own, again=True)
            if item not in unread:
                self.put(item, label, own)
        steps, labels = self.written
        labels.edges, labels.gradients = self.labels.edges, self.labels.gradients
        made = [
            replace(unit, program=replace(unit.program, steps=tuple(own)))
            for unit, own in zip(self.units, steps, strict=True)
        ]
        return made, labels

    def unread(self) -> set[Item]:
        """Returns the forward ops that nothing reads once they are repeated."""
        repeated = {item: own for own, items in self.again.items() for item in items}
        needed = {(k, value) for k, unit in enumerate(self.units) for value in unit.program.live_out}

        def read(item: Item, own: Own | None) -> None:
            needed.update(value for value in self.reads(item) if self.new(value, own) is None)

        for item, own in repeated.items():
            read(item, own)
        unread_ops: set[Item] = set()
        for item in reversed(self.order):
            if item in repeated and needed.isdisjoint(self.makes(item)):
                unread_ops.add(item)
            else:
                read(item, self.of_node(item) if self.label(item).phase in _BACKWARD else None)
        return unread_ops

    def put(self, item: Item, label: Label, own: Own | None, again: bool = False) -> None:
        """Writes an op on all its units as an op of the region `own`, so that it reads that region's recomputed values."""
        steps, labels = self.written
        places = []
        for unit, step in self.steps(item):
            read = ((value, self.new((unit, value), own)) for value in step.reads)
            values = {value: new for value, new in read if new is not None}
            if again:
                values |= {value: self.again_of(value) for value in step.makes}
            places.append((unit, len(steps[unit])))
            steps[unit].append(self.over(step, values, self.rule(step, own) if again and own is not None else ""))
            labels.steps[unit].append(label)
        labels.order.append(tuple(places))

    def rule(self, step: Op, own: Own) -> str:
        """Returns the plan's line that causes the repetition of an op."""
        found = self.nodes.get(step.source) if isinstance(step, Compute) else None
        return str(self.rules[own[0]] if found is None else found[1])

    def over(self, step: Op, values: Mapping[Value, Value], again: str) -> Op:
        """Returns an op over other values; `again`: the line that causes its repetition, else ""."""
        task = TaskKind.BACKWARD if again else step.task
        if isinstance(step, Comm):
            tag = self.tag(step, again)
            inputs, outputs = exchanged(step.inputs, values), exchanged(step.outputs, values)
            return replace(step, inputs=inputs, outputs=outputs, tag=tag, cause=self.events[tag].cause, task=task)
        if not values or not isinstance(step, Compute):
            return step
        made = replace(with_values(step, values), task=task, again=again)
        return (
            replace(made, label=f"{made.label}.{_AGAIN}")
            if again and isinstance(made.label, str) and made.label
            else made
        )

    def tag(self, step: Comm, again: str) -> int:
        """Returns an event's number in the order of all events; its first end lists it."""
        key = step.tag, bool(again)
        if key not in self.tags:
            event, self.tags[key] = self.listed[step.tag], len(self.events)
            cause = f"{event.cause}, {_AGAIN} by {again}" if again else event.cause
            made = self.again_of(event.output) if again else event.output
            self.events.append(replace(event, tag=self.tags[key], output=made, cause=cause))
        return self.tags[key]

    def told(self) -> list[str]:
        """Returns a warning for each pattern that has no effect."""
        repeated = {self.first(item) for items in self.again.values() for item in items}
        sources = {step.source for step in repeated if isinstance(step, Compute)}
        assert self.program.plan.pipeline is not None
        assert self.program.training is not None
        differentiated = {*flowing(self.program.reads, self.program.training)}
        warnings = []
        for rule in self.program.plan.pipeline.recompute:
            nodes = {node for pattern in rule.patterns for node in matched_nodes(self.program, pattern)}
            if nodes and sources.isdisjoint(nodes):
                passed = not differentiated.isdisjoint(nodes)
                why = (
                    "the backward pass needs only what it keeps anyway"
                    if passed
                    else "no gradient passes through its nodes"
                )
                warnings.append(f"{rule.where}: recompute '{rule.text}' changes nothing: {why}")
        return warnings


def _may_repeat(step: Op) -> bool:
    """Whether an op gives the same result when it is repeated, without involving another stage."""
    if isinstance(step, Comm):
        return step.op_type not in (SEND, RECV, ROUTE, RETURN)
    return isinstance(step, Compute) and not any(draws(node) for node in _with_bodies(step.node))


def _with_bodies(node: ir.Node) -> Iterable[ir.Node]:
    yield node
    for body in bodies(node):
        for inner in body:
            yield from _with_bodies(inner)
