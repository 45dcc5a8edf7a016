"""Gathers of stored parameters: a message per unit, `ahead` units before its first reader, and one more in the backward pass if it is
freed.

    order                F: layers.0  layers.1  layers.2   B: layers.2  layers.1  layers.0
    freed, one ahead     G0 G1 | F0 G2 | F1 | F2 B2 G1' | B1 G0' | B0        2 n - 1 messages, two units at once
    kept                 G0 G1 | F0 G2 | F1 | F2 B2 | B1 | B0                n messages, all units at once

A region is a run of readers of one unit between which no op reads another unit. A unit that is not freed has one region with all its
readers; of a freed unit, two regions that begin at most `ahead` regions apart are merged. Each region has its own values, gathered by its
own event, and ops that only transpose or cast a parameter are repeated in each region; so a gathered parameter is in memory from the event
to the last reader of its region, and no longer. The event of region k comes after the first reader of region k - `ahead`, which waits for
its own event: so the computation before it has ended. Where that reader is the region's own first reader, an op of several units, the event
precedes it.

With microbatches a freed unit has regions in the body of each task, and a unit that is not freed is gathered once, before all tasks.

A Cast to 16 bits is done on the shard if no op reads the parameter in its own type: then 16 bits per number are sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, TypeAlias

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import StoredUnit
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Comm, Compute, Event, Op, TaskKind, Value, exchanged, with_values
from partc.compiler.ops.registry import draws
from partc.compiler.pipelines.phases import ONCE, Label, Labels, Unit, in_order
from partc.compiler.plan.groups import ranks_text
from partc.compiler.plan.stored import FREE, KEEP
from partc.runtime.artifact.format import ALL_GATHER, AXIS, StoredPeak, StoredRecord, StoredUnitRecord
from partc.runtime.artifact.stored_readers import FORMS, is_of_module
from partc.runtime.units import size_text

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_AGAIN = ".again"


class Key(NamedTuple):
    """A unit, and the ranks that gather it together."""

    unit: StoredUnit
    ranks: tuple[int, ...]


Track: TypeAlias = tuple[tuple[int, ...], Label | None]
"""The ranks that gather together, and the task whose body has the gathers; None outside of bodies."""
Place: TypeAlias = tuple[Track, int]
"""A region: its track, and its number in the track."""


@dataclass
class Region:
    """A run of readers of a unit: the places of the first and the last reader in a program, and the parameters that they read."""

    key: Key
    first: int
    last: int
    read: set[Value] = field(default_factory=set)


@dataclass(frozen=True)
class Parameter:
    """A gathered parameter: its unit, the op and the event that gather it, the shard, and the gathered value.

    `low`: the Cast of a parameter that is sent in 16 bits.
    """

    key: Key
    step: Comm
    event: Event
    shard: Value
    whole: Value
    low: Compute | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the parameter on a rank after it is gathered."""
        assert self.whole.of is not None
        assert self.whole.of.dtype is not None
        return math.prod(dim for dim in self.whole.shape or () if isinstance(dim, int)) * int(
            self.whole.of.dtype.itemsize
        )


@dataclass
class _Readers:
    """The readers of gathered parameters in a program; `uses` maps an op's place to the parameters that it reads, directly or transposed.

    `parameters`: maps each gathered value to its parameter, as these ranks gather it. `derived`: maps the result of an op that only
    transposes or casts parameters to the op. `bases`: maps a value to the parameters from which it is made. `tracks`: the regions of each
    track.
    """

    parameters: Mapping[Value, Parameter]
    uses: dict[int, set[Value]] = field(default_factory=dict)
    derived: dict[Value, Compute] = field(default_factory=dict)
    bases: dict[Value, set[Value]] = field(default_factory=dict)
    tracks: dict[Track, list[Region]] = field(default_factory=dict)

    def keys(self, values: Iterable[Value]) -> set[Key]:
        """The units of these parameters."""
        return {self.parameters[value].key for value in values}


def gathers(
    program: Lowered, units: Sequence[Unit], labels: Labels, *, divided: bool
) -> tuple[Lowered, list[Unit], Labels]:
    """Returns the units with their gathers in regions, and their labels; the program gets the events, and a record of the gathered bytes.

    `divided`: whether tasks run for several microbatches. Raises CompileError if a unit is to be freed and this lowers no rank's peak.
    """
    found = _Regions(program, units, labels, divided)
    if not found.parameters:
        return program, list(units), labels
    found.choose()
    return _Gathers(found).write()


class _Regions:
    """The regions of all units in the programs.

    `parameters`: the gathered parameters; one that several sets of ranks gather, such as a table that two stages read, is there for each.
    `members`: maps each unit to its parameters. `replaced`: the values whose ops the new gathers replace.
    """

    def __init__(self, program: Lowered, units: Sequence[Unit], labels: Labels, divided: bool) -> None:
        self.program, self.units, self.labels, self.divided = program, units, labels, divided
        self.ahead = program.plan.stored.ahead
        self.parameters = [*self._parameters()]
        self.replaced = {value for one in self.parameters for value in (one.whole, *one.step.makes)}
        self.members: dict[Key, list[Parameter]] = {}
        for one in self.parameters:
            self.members.setdefault(one.key, []).append(one)
        self.readers = [self._readers(unit) for unit in units]
        self.freed: set[Key] = set()

    def _parameters(self) -> Iterable[Parameter]:
        """Yields each gathered parameter of a unit once; a parameter that a program returns as it was gathered is left out."""
        listed, readers = {event.tag: event for event in self.program.events}, dict[Value, list[Op]]()
        first_ops: dict[int, Comm] = {}
        back = {value for unit in self.units for value in unit.program.live_out}
        for unit in self.units:
            held = {*unit.program.live_in}
            for step in unit.steps:
                for value in step.reads:
                    readers.setdefault(value, []).append(step)
                if not isinstance(step, Comm) or step.value not in self.program.pinned.units:
                    continue
                if step.op_type == ALL_GATHER and held.issuperset(step.reads) and back.isdisjoint(step.makes):
                    first_ops.setdefault(step.tag, step)
        for tag, step in first_ops.items():
            event, (shard,), (whole,) = listed[tag], step.reads, step.makes
            key = Key(self.program.pinned.units[step.value], tuple(sorted({*sum(event.ranks, ())})))
            casts = {one for one in readers.get(whole, ()) if isinstance(one, Compute) and one.is_op("Cast")}
            results = {value for one in casts for value in one.makes if _is_low(value) and not _is_low(whole)}
            if len(results) == 1 and len(casts) == len({*readers[whole]}) and back.isdisjoint(results):
                (low,), (cast, *_) = results, casts
                shard = Value(".low", shard, low.of, shard.shape)
                yield Parameter(key, step, event, shard, low, cast)
            else:
                yield Parameter(key, step, event, shard, whole)

    def _readers(self, unit: Unit) -> _Readers:
        own = {one.whole: one for one in self.parameters if not unit.ranks.isdisjoint(one.key.ranks)}
        readers, back = _Readers(own, bases={value: {value} for value in own}), {*unit.program.live_out}
        fixed = {one.value for one in unit.program.weights} | {one.value for one in unit.program.state}
        for at, step in enumerate(unit.steps):
            read = {one for value in step.reads for one in readers.bases.get(value, ())}
            if not read:
                if isinstance(step, Compute) and all(one in fixed or one.constant is not None for one in step.reads):
                    fixed.update(step.makes)
            elif self.is_gather(step):
                continue
            elif (
                isinstance(step, Compute)
                and not draws(step.node)
                and back.isdisjoint(step.makes)
                and all(value in readers.bases or value in fixed or value.constant is not None for value in step.reads)
            ):
                readers.derived |= dict.fromkeys(step.makes, step)
                readers.bases |= dict.fromkeys(step.makes, read)
            else:
                readers.uses[at] = read
        return readers

    def keys(self, values: Iterable[Value], readers: _Readers) -> list[Key]:
        """The units of these parameters, in order."""
        found = readers.keys(values)
        return [key for key in self.members if key in found]

    def is_gather(self, step: Op) -> bool:
        """Whether an op gathers a parameter or casts a gathered one."""
        return not self.replaced.isdisjoint(step.makes)

    def choose(self) -> None:
        """Decides which units are freed, and finds all regions."""
        rules, said = self.program.plan.stored, {key: key.unit.rule.after_forward for key in self.members}
        kept = {key for key, how in said.items() if how == KEEP or (how is None and rules.gather == "step")}
        freed = self.members.keys() - kept
        if self.program.training is None or not self.program.kind.backward:
            self._find(freed)
            return
        whole, least = self._find(set()), self._find(freed)
        if any(least[ranks] < whole[ranks] for ranks in whole):
            return
        if asked := [key for key in freed if said[key] == FREE or rules.gather == "microbatch"]:
            rule, ranks = asked[0].unit.rule, max(whole, key=lambda ranks: whole[ranks])
            there = sum(not {*key.ranks}.isdisjoint(ranks) for key in self.members)
            has = f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {size_text(least[ranks])}"
            fact = f"'{rule.pattern}' is freed, and {has} at once, and {size_text(whole[ranks])} if it is kept"
            law = f"{self.ahead + 1} units are there at once, one of which computes, and these ranks have {there}"
            help_ = "write after_forward: keep, or a pattern that matches smaller modules"
            raise CompileError(Problem(rule.where, fact, law, help_))
        self._find(set())

    def _find(self, freed: Iterable[Key]) -> dict[tuple[int, ...], int]:
        """Finds the regions with these units freed; maps each set of ranks to the peak of its gathered bytes."""
        self.freed = {*freed}
        for readers, labels in zip(self.readers, self.labels.steps, strict=True):
            readers.tracks = self._tracks(readers, labels)
        self._align()
        return {tuple(sorted(unit.ranks)): self._peak(one) for unit, one in zip(self.units, self.readers, strict=True)}

    def _align(self) -> None:
        """Gives ranks that gather together the same regions; a rank without readers in a region still takes part in its event.

        Raises CompileError if the ranks read units in different orders.
        """
        for track in dict.fromkeys(track for readers in self.readers for track in readers.tracks):
            most = max(range(len(self.units)), key=lambda k: len(self.readers[k].tracks.get(track, ())))
            like = self.readers[most].tracks[track]
            for number, (unit, readers) in enumerate(zip(self.units, self.readers, strict=True)):
                own = [*reversed(readers.tracks.get(track, []))]
                if unit.ranks.isdisjoint(track[0]) or [one.key for one in reversed(own)] == [one.key for one in like]:
                    continue
                runs = list[Region]()
                for one in like:
                    if own and own[-1].key == one.key:
                        runs.append(own.pop())
                        continue
                    at = max(self._same_place(most, number, one.first), runs[-1].first if runs else -1)
                    runs.append(Region(one.key, at, at))
                if own:
                    name, rule = own[-1].key.unit.name, own[-1].key.unit.rule
                    fact = f"{ranks_text(track[0])} read '{name}' and other units in different orders"
                    law = "ranks that store parameters together gather them in one order"
                    help_ = "place what reads them on the same ranks, or store them along another axis"
                    raise CompileError(Problem(rule.where, fact, law, help_))
                readers.tracks[track] = runs

    def _same_place(self, first: int, other: int, at: int) -> int:
        """The place in program `other` before the same events as place `at` in program `first`."""
        there, here = self.units[first].steps[at + 1 :], self.units[other].steps
        later = {step.tag for step in there if isinstance(step, Comm) and not self.is_gather(step)}
        return next((k for k, step in enumerate(here) if isinstance(step, Comm) and step.tag in later), len(here)) - 1

    def track(self, key: Key, label: Label) -> Track:
        """The track of a unit's region whose reader has this label."""
        return key.ranks, label if self.divided and key in self.freed else None

    def _tracks(self, readers: _Readers, labels: Sequence[Label]) -> dict[Track, list[Region]]:
        """The regions of a program's units, in the order in which they begin."""
        tracks: dict[Track, list[Region]] = {}
        recent: dict[Track, set[Key]] = {}
        for at, read in readers.uses.items():
            keys = self.keys(read, readers)
            for track in dict.fromkeys(self.track(key, labels[at]) for key in keys):
                here = [key for key in keys if self.track(key, labels[at]) == track]
                runs, before = tracks.setdefault(track, []), recent.get(track, set())
                for key in here:
                    last = next((k for k in reversed(range(len(runs))) if runs[k].key == key), None)
                    near = last is not None and (
                        key in before or key not in self.freed or len(runs) - last <= self.ahead
                    )
                    if not near or last is None:
                        last = len(runs)
                        runs.append(Region(key, at, at))
                    runs[last].last = at
                    runs[last].read |= {value for value in read if readers.parameters[value].key == key}
                recent[track] = {*here}
        return tracks

    def _peak(self, readers: _Readers) -> int:
        """The peak of a program's gathered bytes; with microbatches, those of units that are not freed plus the largest of a task."""
        sizes = {key: sum(one.bytes for one in some) for key, some in self.members.items()}
        spans: dict[Label | None, list[tuple[int, int, int]]] = {}
        for (_, label), runs in readers.tracks.items():
            for k, one in enumerate(runs):
                begin = runs[k - self.ahead].first if k >= self.ahead else -1
                spans.setdefault(label, []).append((begin, one.last, sizes[one.key]))
        most = {
            label: max(sum(size for first, last, size in some if first <= at <= last) for at, _, _ in some)
            for label, some in spans.items()
        }
        if not self.divided:
            return max(most.values(), default=0)
        return sum(size for _, _, size in spans.pop(None, ())) + max((most[label] for label in spans), default=0)

    def place(self, readers: _Readers, key: Key, at: int, label: Label) -> Place | None:
        track = self.track(key, label)
        runs = readers.tracks.get(track, ())
        regions = ((k, one) for k, one in enumerate(runs) if one.read and one.key == key)
        return next(((track, k) for k, one in regions if one.first <= at <= one.last), None)

    def is_lazy(self, step: Compute, readers: _Readers) -> bool:
        """Whether an op only transposes or casts parameters and is repeated in each region; with microbatches, only for freed units."""
        read = readers.bases.get(step.makes[0], set()) if step.makes and step.makes[0] in readers.derived else set()
        return bool(read) and (not self.divided or not self.freed.isdisjoint(readers.keys(read)))


class _Gathers:
    """Writes the gathers of all regions into the programs."""

    def __init__(self, regions: _Regions) -> None:
        self.regions, self.units = regions, regions.units
        self.read: dict[Place, set[Value]] = {}
        """Maps each region to the parameters that a rank reads there."""
        firsts: dict[Key, Place] = {}
        for readers in regions.readers:
            for track, runs in readers.tracks.items():
                for k, region in enumerate(runs):
                    firsts.setdefault(region.key, (track, k))
                    self.read.setdefault((track, k), set()).update(region.read)
        self.first = {*firsts.values()}
        """The first region of each unit."""
        self.tags = count(1 + max((event.tag for event in regions.program.events), default=0))
        self.events = {event.tag: event for event in regions.program.events}
        self.messages: dict[Place, list[Comm]] = {}
        self.gathered: dict[Place, Key] = {}
        """Maps each region to its unit, in the order in which gathers are written."""
        self.sizes: dict[Value, int] = {}
        """The bytes of each value that is gathered."""
        self.casts: dict[Value, Op] = {}
        self.values: dict[tuple[Value, tuple[Place, ...], TaskKind], Value] = {}
        self.times: Counter[Value] = Counter()
        """Counts, for each value, the values that are named after it."""

    def write(self) -> tuple[Lowered, list[Unit], Labels]:
        """Returns the units with all gathers, their labels, and the program with its events in an order that holds on all ranks."""
        written = [self._written(k) for k in range(len(self.units))]
        record = self._record(written)
        programs = [steps for steps, _ in written]
        order = list(in_order(programs))
        assert sum(map(len, order)) == sum(map(len, programs)), "ranks wait for each other's gathers"
        tags: dict[int, int] = {}
        events: list[Event] = []
        for places in order:
            (unit, at), *_ = places
            step = programs[unit][at]
            if isinstance(step, Comm) and step.tag not in tags:
                tags[step.tag] = len(events)
                events.append(replace(self.events[step.tag], tag=tags[step.tag]))
        renumbered: dict[int, Op] = {}
        for steps in programs:
            for at, step in enumerate(steps):
                if isinstance(step, Comm):
                    steps[at] = renumbered.setdefault(id(step), replace(step, tag=tags[step.tag]))
        units = [
            replace(unit, program=replace(unit.program, steps=tuple(steps)))
            for unit, steps in zip(self.units, programs, strict=True)
        ]
        labels = replace(self.regions.labels, steps=[some for _, some in written], order=order)
        return replace(self.regions.program, events=tuple(events), stored=record, gathered=self.sizes), units, labels

    def _written(self, number: int) -> tuple[list[Op], list[Label]]:
        """Returns a program's ops with its gathers, and their labels."""
        unit, readers, old = self.units[number], self.regions.readers[number], self.regions.labels.steps[number]
        steps: list[Op] = []
        labels: list[Label] = []
        done: set[Value] = set()
        early, due = dict[int, list[tuple[Place, Key]]](), dict[int, list[tuple[Place, Key]]]()
        """The gathers before each place, whose op is the first reader of several units, and those that follow it."""

        def put(some: Iterable[Op], label: Label) -> None:
            for step in some:
                steps.append(step)
                labels.append(label)

        low = [one for one in readers.parameters.values() if one.low is not None]
        put((self._cast(one) for one in low), ONCE)
        for track, runs in readers.tracks.items():
            first = runs if self.regions.divided and track[1] is None else runs[: self.regions.ahead]
            for k, one in enumerate(first):
                put(self._gather((track, k), one.key, steps), track[1] or ONCE)
            for k, one in enumerate(runs[len(first) :], len(first)):
                at = runs[k - self.regions.ahead].first
                (early if at == one.first and one.read else due).setdefault(at, []).append(((track, k), one.key))
        for at, (step, label) in enumerate(zip(unit.steps, old, strict=True)):
            for there, key in early.get(at, ()):
                put(self._gather(there, key, steps), there[0][1] or label)
            if not self.regions.is_gather(step) and not (
                isinstance(step, Compute) and self.regions.is_lazy(step, readers)
            ):
                keys = self.regions.keys(readers.uses.get(at, ()), readers)
                places = {key: place for key in keys if (place := self.regions.place(readers, key, at, label))}
                clones, values = list[Op](), dict[Value, Value]()
                for value in step.reads if places else ():
                    values[value] = self._value(value, places, readers, step, clones, done)
                put((*clones, _over(step, values)), label)
            for place, key in due.get(at, ()):
                put(self._gather(place, key, steps), place[0][1] or label)
        return steps, labels

    def _value(
        self,
        value: Value,
        places: Mapping[Key, Place],
        readers: _Readers,
        reader: Op,
        clones: list[Op],
        done: set[Value],
    ) -> Value:
        """The value that a reader in these regions reads instead of `value`; adds the ops that make it, unless `done`, to `clones`."""
        keys = self.regions.keys(readers.bases.get(value, ()), readers)
        regions = tuple(places[key] for key in keys if key in places)
        if not regions:
            return value
        maker = readers.derived.get(value)
        if maker is None:
            return self._own(value, regions)
        if not self.regions.is_lazy(maker, readers):
            return value
        own_values = {one: self._own(one, regions, reader.task) for one in maker.makes}
        if own_values[value] not in done:
            done.update(own_values.values())
            read = {one: self._value(one, places, readers, reader, clones, done) for one in maker.reads}
            clone = with_values(replace(maker, task=reader.task), {**read, **own_values})
            if own_values[value] is not value:
                named = clone.label if isinstance(clone.label, Value) else None
                clone = replace(
                    clone,
                    label=named.derived(_AGAIN)
                    if named and named not in own_values.values()
                    else named or f"{clone.label}{_AGAIN}",
                )
            clones.append(clone)
        return own_values[value]

    def _own(self, value: Value, regions: tuple[Place, ...], task: TaskKind = TaskKind.FORWARD) -> Value:
        """The value of a gathered or derived parameter in these regions, for ops of this task; `value` itself in the first regions."""
        key = value, regions, task
        if key not in self.values:
            is_first = self.first.issuperset(regions) and task is TaskKind.FORWARD
            self.times[value] += not is_first
            number = self.times[value] if self.times[value] > 1 else ""  # the bodies of a file have names of their own
            self.values[key] = value if is_first else value.derived(f"{_AGAIN}{number}")
        return self.values[key]

    def _cast(self, parameter: Parameter) -> Op:
        """The Cast to 16 bits of a shard, the same op in all programs."""
        assert parameter.low is not None
        if parameter.shard not in self.casts:
            self.casts[parameter.shard] = replace(
                parameter.low, inputs=(parameter.step.reads[0],), outputs=(parameter.shard,), label=parameter.shard
            )
        return self.casts[parameter.shard]

    def _gather(self, place: Place, key: Key, steps: Sequence[Op]) -> list[Comm]:
        """The messages that gather a unit for a region: one for each type of parameters sharded along dim 0, and one for each other one."""
        if place not in self.messages:
            task = steps[-1].task if steps else TaskKind.FORWARD
            joined: dict[object, list[Parameter]] = {}
            read = self.read[place]
            for one in [one for one in self.regions.members[key] if one.whole in read]:
                dim = one.step.attributes[AXIS]
                kind = one.event.group, None if one.whole.of is None else one.whole.of.dtype, one.whole if dim else None
                joined.setdefault(kind, []).append(one)
            self.messages[place] = [self._message(some, place, task) for some in joined.values()]
            self.gathered[place] = key
        return self.messages[place]

    def _message(self, members: Sequence[Parameter], place: Place, task: TaskKind) -> Comm:
        """Adds one event that gathers `members`, parameters of one unit, and returns its op."""
        first, tag, name = members[0], next(self.tags), members[0].key.unit.name
        gathered = tuple(self._own(one.whole, (place,)) for one in members)
        self.sizes |= {value: one.bytes for value, one in zip(gathered, members, strict=True)}
        cause = f"parameters of '{name}'" if len(members) > 1 else f"parameter '{name_of(first.step.value)}'"
        cause += "" if place in self.first else ", gathered again"
        value = first.step.value if first.low is None or first.whole.of is None else first.whole.of
        amount = str(sum(_part(one, int(one.event.bytes)) for one in members))
        shape = first.event.shape
        if len(members) > 1:
            shape = (sum(math.prod(dim for dim in one.event.shape or () if isinstance(dim, int)) for one in members),)
        event = replace(first.event, value=value, output=gathered[0], shape=shape, bytes=amount, cause=cause)
        self.events[tag] = event
        given = tuple(one.shard for one in members)
        return replace(
            first.step, inputs=given, outputs=gathered, tag=tag, value=value, cause=cause, bytes=amount, task=task
        )

    def _counted(self, steps: Sequence[Op], labels: Sequence[Label]) -> int:
        """The peak of a program's gathered bytes, counted in its ops; with microbatches, of units that are not freed plus a task's peak."""
        if not self.regions.divided:
            return most_gathered(steps, self.sizes)
        apart = {label: [step for step, own in zip(steps, labels, strict=True) if own == label] for label in {*labels}}
        kept = sum(self.sizes.get(value, 0) for step in apart.pop(ONCE, ()) for value in step.makes)
        return kept + max((most_gathered(some, self.sizes) for some in apart.values()), default=0)

    def _readers(self, programs: Sequence[Sequence[Op]]) -> dict[Value, set[str]]:
        """Maps each gathered parameter to the paths of the nodes that read it, or its transpose or cast."""
        readers: dict[Value, set[str]] = {one.whole: set() for one in self.regions.parameters}
        whole = {made: value for (value, _, _), made in self.values.items() if value in readers}
        program = self.regions.program
        for steps in programs:
            bases = dict(whole)
            for step in steps:
                if not isinstance(step, Compute):
                    continue
                if (placed := program.placement.get(step.source)) is not None and placed.rule:
                    path = program.paths[step.source]
                    for value in step.reads:
                        if value in bases:
                            readers[bases[value]].add(path)
                if step.node.op_type in FORMS and step.reads[0] in bases:
                    bases |= dict.fromkeys(step.makes, bases[step.reads[0]])
        return readers

    def _record(self, written: Sequence[tuple[Sequence[Op], Sequence[Label]]]) -> StoredRecord:
        """The manifest's record of stored parameters: the gathered bytes and the readers of each unit, and the peak of each rank."""
        readers = self._readers([steps for steps, _ in written])

        def others(parameter: Parameter) -> list[str]:
            name = name_of(parameter.step.value)
            return sorted(path for path in readers[parameter.whole] if not is_of_module(path, name))

        most = dict[int, int]()
        for unit, (steps, labels) in zip(self.units, written, strict=True):
            most |= dict.fromkeys(unit.ranks, self._counted(steps, labels))
        rules = self.regions.program.plan.pipeline
        times = 1 if rules is None or not self.regions.divided else rules.microbatches
        gathered = Counter[Key]()
        for place, key in self.gathered.items():
            gathered[key] += len(self.messages[place]) * (1 if place[0][1] in (None, ONCE) else times)
        return StoredRecord(
            ahead=self.regions.ahead,
            units=[
                StoredUnitRecord(
                    unit=key.unit.name,
                    axis="" if key.unit.rule.axis is True else key.unit.rule.axis,
                    ranks=list(key.ranks),
                    tensors=[name_of(one.step.value) for one in some],
                    bytes=sum(one.bytes for one in some),
                    freed=key in self.regions.freed,
                    gathers=gathered[key],
                    readers={name_of(one.step.value): paths for one in some if (paths := others(one))},
                )
                for key, some in self.regions.members.items()
            ],
            peaks=peaks_of(most),
        )


def most_gathered(steps: Sequence[Op], sizes: Mapping[Value, int]) -> int:
    """The peak of the bytes that ops have gathered: each value counts until its last reader, an unread one until the next gather.

    `sizes`: the bytes of each value that is gathered.
    """
    last = {value: at for at, step in enumerate(steps) for value in step.reads if value in sizes}
    before, events = -1, list[tuple[int, int]]()
    for at, step in enumerate(steps):
        if not any(value in sizes for value in step.makes):
            before = at
            continue
        events.append((before, at))
    begun, most = set[Value](), 0
    for before, at in events:
        alive = {value for value in begun if last.get(value, -1) >= before} | {*steps[at].makes}
        most = max(most, sum(sizes[value] for value in alive))
        begun.update(steps[at].makes)
    return most


def peaks_of(most: Mapping[int, int]) -> list[StoredPeak]:
    """Returns the manifest's peaks; `most` maps ranks to theirs, in bytes."""
    ranks: dict[int, list[int]] = {}
    for rank in sorted(most):
        ranks.setdefault(most[rank], []).append(rank)
    return [StoredPeak(ranks=some, bytes=peak) for peak, some in sorted(ranks.items())]


def _is_low(value: Value) -> bool:
    return value.of is not None and value.of.dtype in _HALVES


def _part(parameter: Parameter, amount: int) -> int:
    """The bytes that a gather moves in the type that is sent; `amount`: the bytes in the parameter's own type."""
    own, made = parameter.step.value.dtype, None if parameter.whole.of is None else parameter.whole.of.dtype
    return int(amount * made.itemsize / own.itemsize) if own is not None and made is not None else amount


def _over(step: Op, values: Mapping[Value, Value]) -> Op:
    """Returns an op that reads `values` in place of its inputs."""
    if isinstance(step, Compute):
        return with_values(step, values)
    return replace(step, inputs=exchanged(step.inputs, values)) if values and isinstance(step, Comm) else step
