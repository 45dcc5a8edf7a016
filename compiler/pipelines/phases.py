"""Finds the task of every op of the ranks' programs: the pass and the stage that it belongs to, if any.

    ONCE      no microbatch: masks, casts of weights; made before the first task
    F s, B s  the forward or backward pass of stage s; B is the whole of it, or where it is split the gradients that leave the stage
    W s       what is left of a backward pass that is split: it only feeds gradients of parameters
    UPDATE    the reduction of gradients and the update; behind the last task

The passes that write ops say whether these are forward, backward or update; the stage is that of the model's node. What a change of layout
adds, and a message or a collective, belongs to the task that makes what it takes. What only serves another stage's task, on a rank that
does not run the first (the cutting up of what was received), goes with its reader.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from partc.compiler.ir.programs import Comm, Compute, Op, RankProgram, TaskKind, Value
from partc.compiler.pipelines.stages import NodeStages
from partc.runtime.artifact.format import RECV, REDUCE, SEND, SUM


class Phase(enum.IntEnum):
    """The phases of a step, in order."""

    ONCE = 0
    FORWARD = 1
    BACKWARD = 2
    WEIGHT = 3
    UPDATE = 4


class Label(NamedTuple):
    """A phase, and the stage of an op of a task; 0 in the other phases."""

    phase: Phase
    stage: int = 0


ONCE, UPDATE = Label(Phase.ONCE), Label(Phase.UPDATE)
Place: TypeAlias = tuple[int, int]
"""An op: the number of the program, and its place in it."""


@dataclass(frozen=True)
class Unit:
    """The program of ranks that do the same, also for the numbers of the whole batch.

    `ranks`: which these are. `batch`: inputs of which each microbatch has its own. `sums`: the state in which gradients are added up.
    `joined`: outputs have the records of all microbatches, and are no sums or means over them.
    """

    program: RankProgram
    ranks: frozenset[int]
    batch: frozenset[Value]
    sums: frozenset[Value]
    joined: bool = False

    @property
    def steps(self) -> Sequence[Op]:
        """The ops in order."""
        return self.program.steps

    def adds_up(self, step: Op) -> bool:
        """Whether an op adds a microbatch's gradient to the sum of those before it."""
        return isinstance(step, Compute) and not self.sums.isdisjoint(step.reads)

    def appends(self, step: Op) -> bool:
        """Whether an op takes what every microbatch gives, one after the other."""
        return isinstance(step, Compute) and not self.program.concatenated.isdisjoint(step.makes)


@dataclass
class Labels:
    """`steps`: per unit the label of each of its ops. `order`: all ops of all units as they follow each other, an event's at once.

    `edges`: pairs of stages of which the second reads what the first makes; `gradients`: those along which cotangents come back.
    """

    steps: list[list[Label]]
    order: list[tuple[Place, ...]] = field(default_factory=list)
    edges: set[tuple[int, int]] = field(default_factory=set)
    gradients: set[tuple[int, int]] = field(default_factory=set)


def labelled(units: Sequence[Unit], stages: NodeStages) -> Labels:
    """The labels of all ops, of backward passes that are not split, and the edges between stages."""
    labelling = Labels([[ONCE] * len(unit.steps) for unit in units])
    values = [dict.fromkeys(unit.batch, Label(Phase.FORWARD)) for unit in units]
    for places in in_order([unit.steps for unit in units]):
        labelling.order.append(places)
        (first, at), *_ = places
        step = units[first].steps[at]
        labels = [values[u][one] for u, k in places for one in units[u].steps[k].reads if one in values[u]]
        label = _label(units[first], step, labels, stages)
        for unit, k in places:
            labelling.steps[unit][k] = label
            if label != ONCE:
                values[unit].update(dict.fromkeys(units[unit].steps[k].makes, label))
    _with_readers(units, stages, labelling)
    if not any(unit.joined for unit in units):
        _deliver_once(units, labelling)
    _find_edges(units, labelling)
    return labelling


def _label(unit: Unit, step: Op, labels: Collection[Label], stages: NodeStages) -> Label:
    """The label of an op by what it is and by those of its operands, of which it has to wait for the last."""
    adds_up = unit.adds_up(step)
    if step.task is TaskKind.UPDATE and not adds_up:
        return UPDATE
    labels = [one for one in labels if one != UPDATE]
    if not labels:
        return ONCE
    backward = step.task is TaskKind.BACKWARD or adds_up
    phase = max(Phase.BACKWARD if backward else Phase.FORWARD, *(one.phase for one in labels))
    own = stages.on(step.source, unit.program.rank) if isinstance(step, Compute) else None
    if own is not None:
        return Label(phase, own)
    last = max(labels, key=_time)
    return Label(phase, last.stage)


def _time(label: Label) -> tuple[int, int]:
    """Labels in the order of time, of one microbatch: later stages run forward later, and backward earlier."""
    return label.phase, label.stage if label.phase is Phase.FORWARD else -label.stage


def _with_readers(units: Sequence[Unit], stages: NodeStages, labels: Labels) -> None:
    """Moves ops of a stage that none of their ranks runs to the first of their readers, but for a received value that is handed on."""
    readers: list[dict[Value, list[Label]]] = [{} for _ in units]
    received = [
        {value for one in unit.steps if isinstance(one, Comm) and one.op_type == RECV for value in one.makes}
        for unit in units
    ]
    for places in reversed(labels.order):
        (first, at), *_ = places
        step, label = units[first].steps[at], labels.steps[first][at]
        made = [(unit, value) for unit, k in places for value in units[unit].steps[k].makes]
        if Phase.ONCE < label.phase < Phase.UPDATE:
            hosted = any(units[unit].program.rank in stages.groups[label.stage] for unit, _ in places)
            later = [one for unit, value in made for one in readers[unit].get(value, ()) if one != UPDATE]
            ends = [(unit, units[unit].steps[k]) for unit, k in places]
            handed_on = all(value in received[unit] for unit, end in ends for value in end.reads)
            message = isinstance(step, Comm) and step.op_type in (SEND, RECV)
            if later and not hosted and not (message and handed_on):
                label = min(later, key=_time)
        for unit, k in places:
            labels.steps[unit][k] = label
            for value in units[unit].steps[k].reads:
                readers[unit].setdefault(value, []).append(label)


def _deliver_once(units: Sequence[Unit], labels: Labels) -> None:
    """Ops that only bring outputs to their ranks run once, on the joined outputs of all microbatches.

    A message whose value nothing has a use for brings no output: its value may have the records of a microbatch.
    """
    received = [{value for step in unit.steps if isinstance(step, Comm) for value in step.makes} for unit in units]
    used = [
        {
            *(held.value for held in unit.program.outputs),
            *(value for step in unit.steps for value in step.reads),
            *(one.next for one in unit.program.state if one.next is not None),
        }
        for unit in units
    ]
    readers: list[set[Value]] = [set() for _ in units]
    for places in reversed(labels.order):
        (first, at), *_ = places
        step = units[first].steps[at]
        made = [value in readers[unit] for unit, k in places for value in units[unit].steps[k].makes]
        if labels.steps[first][at].phase is Phase.FORWARD and not any(made):
            renames = isinstance(step, Compute) and step.node.op_type == "Identity"
            own = renames and all(value in received[first] for value in step.reads)
            linear = isinstance(step, Comm) and step.attributes.get(REDUCE, SUM) == SUM
            linear = linear and any(value in used[u] for u, k in places for value in units[u].steps[k].makes)
            if own or linear:
                for unit, k in places:
                    labels.steps[unit][k] = UPDATE
                continue
        for unit, k in places:
            if labels.steps[unit][k] != UPDATE:
                readers[unit].update(units[unit].steps[k].reads)


def _find_edges(units: Sequence[Unit], labels: Labels) -> None:
    values: list[dict[Value, Label]] = [{} for _ in units]
    for places in labels.order:
        for unit, k in places:
            label = labels.steps[unit][k]
            for value in units[unit].steps[k].reads:
                before = values[unit].get(value, label)
                if before.stage != label.stage and before.phase == label.phase:
                    if label.phase is Phase.FORWARD:
                        labels.edges.add((before.stage, label.stage))
                    elif label.phase is Phase.BACKWARD:
                        labels.gradients.add((label.stage, before.stage))
        for unit, k in places:
            values[unit].update(dict.fromkeys(units[unit].steps[k].makes, labels.steps[unit][k]))


def split_backward(units: Sequence[Unit], labels: Labels, stages: Collection[int]) -> None:
    """Splits the backward passes of some stages: W are the ops from which no cotangent that leaves the stage can be reached."""
    readers: list[dict[Value, set[Label]]] = [{} for _ in units]
    for places in reversed(labels.order):
        (first, at), *_ = places
        label = labels.steps[first][at]
        if label.phase is Phase.BACKWARD and label.stage in stages:
            made = [(unit, value) for unit, k in places for value in units[unit].steps[k].makes]
            read = {one for unit, value in made for one in readers[unit].get(value, ()) if one != UPDATE}
            if label not in read and all(one.stage == label.stage for one in read):
                label = Label(Phase.WEIGHT, label.stage)
        for unit, k in places:
            labels.steps[unit][k] = label
            for value in units[unit].steps[k].reads:
                readers[unit].setdefault(value, set()).add(label)


def in_order(programs: Sequence[Sequence[Op]]) -> Iterator[tuple[Place, ...]]:
    """The ops of all programs in an order in which they can run; an event stands once, with its place in each of its programs."""
    members: dict[int, int] = {}
    for steps in programs:
        for step in steps:
            if isinstance(step, Comm):
                members[step.tag] = members.get(step.tag, 0) + 1
    at = [0] * len(programs)
    waiting: dict[int, list[Place]] = {}
    ready = list(reversed(range(len(programs))))
    while ready:
        unit = ready.pop()
        steps = programs[unit]
        while at[unit] < len(steps):
            step = steps[at[unit]]
            if not isinstance(step, Comm):
                yield ((unit, at[unit]),)
                at[unit] += 1
                continue
            there = waiting.setdefault(step.tag, [])
            there.append((unit, at[unit]))
            if len(there) < members[step.tag]:
                break
            yield tuple(sorted(there))
            for other, k in there:
                at[other] = k + 1
            ready += [other for other, _ in there if other != unit]
