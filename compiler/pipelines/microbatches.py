"""Pass: the programs of one microbatch become those of a step of all of them: rows of calls, in the order of a schedule.

    of one microbatch     x -> Relu -> Send(h)                      Recv(h.grad) -> ... -> Add(w.grad, sum) -> update
    of a step of two      Split(x) 0F0 Send(h.0) 0F1 Send(h.1)      Recv(h.grad.0) 0B0 Recv(h.grad.1) 0B1 -> update

A task is a call of its body (`bodies.py`), which is there once however many microbatches there are; all that depends on one has a name
for each. Tasks of all ranks are written in one global order, as ops are everywhere, so that a message stands right behind the task that
makes it, on both ranks, and no program can deadlock. The dims are those of the whole batch: `batch` of a microbatch is `batch/2` here.

The gradient of a weight is added up in the bodies: a call takes the sum of those before it, the first one zeros.

A loss is a sum or a mean of those of the microbatches, exactly, for the whole batch's denominators are made first (`training/in_parts.py`).
Statistics that a node replaces are replaced once, by the mean over the microbatches of what each makes of the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    Event,
    RankOp,
    RankProgram,
    TaskBody,
    TaskCall,
    TaskKind,
    made_names,
    read_names,
)
from partc.compiler.ir.training import Training
from partc.compiler.pipelines.batch_dims import BatchDims
from partc.compiler.pipelines.batch_totals import write_totals
from partc.compiler.pipelines.bodies import (
    LETTERS,
    Inlined,
    Slot,
    body_name,
    body_of,
    readers_beside,
    slots,
    with_products_added,
)
from partc.compiler.pipelines.phases import UPDATE, Label, Labels, Phase, Place, Unit
from partc.compiler.pipelines.records import Records
from partc.compiler.pipelines.row import Names, Row, named
from partc.compiler.pipelines.stages import NodeStages
from partc.compiler.training.in_parts import PART
from partc.runtime.artifact.cells import Kind, Task

PHASES = {Kind(letter): phase for phase, letter in LETTERS.items()}
"""The phase of each kind of task."""


def rows_of(
    program: Program,
    units: Sequence[Unit],
    labels: Labels,
    stages: NodeStages,
    order: Iterable[Task],
    count: int,
    totals: Program | None,
) -> Program:
    """The program of a whole step; `order` are the tasks of all ranks as they follow each other, `totals` makes the batch's numbers."""
    return _Rows(program, units, labels, stages, count, totals).write(order)


class _Rows:
    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        labels: Labels,
        stages: NodeStages,
        count: int,
        totals: Program | None,
    ) -> None:
        self.program, self.units, self.labels, self.count, self.totals = program, units, labels, count, totals
        self.training = program.training
        self.dims = BatchDims(program.symbols, count)
        self.events: list[Event] = []
        self.tags: dict[int, int] = {}
        self.total_tags: dict[tuple[int, int | None], int] = {}
        self.unused = 0
        """The first tag that no event has."""
        self.listed = {event.tag: event for event in program.events}
        self.names = Names((unit.program for unit in units), count)
        self.records = Records(program, units, self.dims, self.names)
        self.slots = slots(units, labels, stages)
        self.rows = [self._row(unit) for unit in units]
        self.plain: dict[TaskBody, list[str]] = {}
        self.inlined: list[set[RankOp]] = []
        """By unit the ops that are nowhere but in bodies."""

    def _row(self, unit: Unit) -> Row:
        like = unit.program
        row = Row(unit, constants=dict(like.constants), micro=[{} for _ in range(self.count)])
        row.types = {name: (value, self.dims.shape(shape)) for name, (value, shape) in like.types.items()}
        return row

    def write(self, order: Iterable[Task]) -> Program:
        """The program of the step."""
        once: list[Place] = []
        last: list[Place] = []
        for places in self.labels.order:
            label = self.labels.steps[places[0][0]][places[0][1]]
            once += places if label.phase is Phase.ONCE else ()
            last += places if label == UPDATE else ()
        for row in self.rows:
            self.records.deal(row)
        if self.totals is not None:
            summed = self.training.summed if self.training else ()
            write_totals(self.totals, self.rows, self.names, self._of_totals, summed)
        self._make_bodies()
        self._write(
            [place for place in once if self.units[place[0]].steps[place[1]] not in self.inlined[place[0]]], None
        )
        for k, row in enumerate(self.rows):
            row.begin_sums((step for slot in self.slots.values() for step in slot.bodies.get(k, ())), self.names)
        for task in order:
            label = Label(PHASES[task.kind], task.stage)
            self._call(label, self.slots.get(label, Slot()), task.microbatch)
        for row, labels in zip(self.rows, self.labels.steps, strict=True):
            self.records.join(row, labels)
        self._write(last, None)
        return self._finished()

    def _make_bodies(self) -> None:
        """The bodies of all tasks, whose events get a tag for each microbatch."""
        beside = readers_beside(self.units, self.labels, self.slots)
        inlined = [Inlined(unit, labels) for unit, labels in zip(self.units, self.labels.steps, strict=True)]
        for label, slot in self.slots.items():
            for event in slot.events:
                if event.tag not in self.tags:
                    self.tags[event.tag] = self.unused
                    self.unused += self.count
            for k, steps in slot.bodies.items():
                row, wanted = self.rows[k], beside[k].get(label, set())
                every, more = inlined[k].among(with_products_added(row.unit, steps, wanted))
                own = {name: self.names.of(name, body_name(label)) for name in more}
                row.bodies[label] = self._in_dims(body_of(row.unit, label, every, wanted), own)
        for k, row in enumerate(self.rows):
            inside = {step for slot in self.slots.values() for step in slot.bodies.get(k, ())}
            self.inlined.append(inlined[k].unread(row.bodies.values(), inside))

    def _in_dims(self, body: TaskBody, own: Mapping[str, str]) -> TaskBody:
        """A body in the dims of the whole batch, with names of which there is one for each microbatch, and with its events' tags.

        `own`: names of what several bodies have each for itself.
        """
        made = {name for step in body.steps for name in made_names(step) if name}
        names = {name: self.names.base(name) for name in sorted(made) if self.names.base(name) != name} | {**own}
        steps: list[ComputeOp | CommOp] = []
        for step in body.steps:
            if isinstance(step, CommOp):
                inputs, outputs = (tuple(names.get(n, n) for n in some) for some in (step.inputs, step.outputs))
                amount, tag = self.dims.text(step.bytes), self.tags[step.tag]
                steps.append(replace(step, inputs=inputs, outputs=outputs, tag=tag, bytes=amount))
            elif isinstance(step, ComputeOp):
                steps.append(named(step, names))
        return replace(
            body,
            outputs=tuple(names.get(name, name) for name in body.outputs),
            steps=tuple(steps),
            types={
                names.get(name, name): (value, self.dims.shape(shape)) for name, (value, shape) in body.types.items()
            },
        )

    def _call(self, label: Label, slot: Slot, k: int) -> None:
        """Writes a task of a microbatch: the calls of all its ranks, then the events beside them; events are listed in order."""
        for event in slot.events:
            self._list(self.listed[event.tag], k)
        for row in self.rows:
            if (body := row.bodies.get(label)) is not None:
                row.steps.append(self._called(row, label, body, k))
        for places in slot.beside:
            for at, place in places:
                moved = self._copied(self.rows[at], self.units[at].steps[place], k)
                cell = f"{label.stage}{LETTERS[label.phase]}{k}"
                self.rows[at].steps.append(replace(moved, cell=cell) if isinstance(moved, CommOp) else moved)

    def _called(self, row: Row, label: Label, body: TaskBody, k: int) -> TaskCall:
        names = row.micro[k]
        row.calls[label] = row.calls.get(label, 0) + 1
        made: list[str] = []
        sums = {kept: now for name in self._plain(body) if name in row.sums for now, kept in [row.sums[name]]}
        inputs = tuple(sums.get(name) or names.get(name, name) for name in body.inputs)
        for name in self._plain(body):
            # the last sum has the name that it has without microbatches, by which messages that bring it to other ranks are listed
            is_last = name in row.sums and row.calls[label] == self.count
            names[name] = name if is_last else self.names.in_microbatch(name, k)
            if name in row.types:
                row.types[names[name]] = row.types[name]
            made.append(names[name])
            if name in row.sums:
                row.sums[name] = names[name], row.sums[name][1]
        kind = TaskKind.FORWARD if label.phase is Phase.FORWARD else TaskKind.BACKWARD
        return TaskCall(body, k, inputs, tuple(made), kind)

    def _plain(self, body: TaskBody) -> list[str]:
        """The outputs of a body by the names that they have without microbatches."""
        if body not in self.plain:
            by_base = {base: name for name, base in self.names.bases.items()}
            self.plain[body] = [by_base.get(name, name) for name in body.outputs]
        return self.plain[body]

    def _write(self, places: Iterable[Place], k: int | None) -> None:
        """Writes ops of all ranks once, in the order that all have in common."""
        for at, place in places:
            row, step = self.rows[at], self.units[at].steps[place]
            if isinstance(step, CommOp) and step.tag not in self.tags:
                self.tags[step.tag] = self.unused
                self.unused += 1
                self._list(self.listed[step.tag], None)
            if isinstance(step, ComputeOp) and row.unit.adds_up(step):
                row.add_alike(step, self.names)
            elif isinstance(step, ComputeOp) and row.unit.appends(step):
                row.append_all(step)
            else:
                row.steps.append(self._copied(row, step, k))

    def _copied(self, row: Row, step: RankOp, k: int | None) -> RankOp:
        """An op with the names of a microbatch, or of none."""
        names = row.micro[k] if k is not None else {}
        if k is not None:
            for name in filter(None, made_names(step)):
                names[name] = self.names.in_microbatch(name, k)
                if name in row.types:
                    row.types[names[name]] = row.types[name]
        if isinstance(step, CommOp):
            return self._renamed(step, names, k)
        assert isinstance(step, ComputeOp)
        return named(step, names)

    def _renamed(self, step: CommOp, names: Mapping[str, str], k: int | None) -> CommOp:
        """A message or collective with its own tag."""
        inputs, made = (tuple(names.get(name, name) for name in some) for some in (step.inputs, step.outputs))
        tag = self.tags[step.tag] + (k or 0)
        return replace(step, inputs=inputs, outputs=made, tag=tag, bytes=self.dims.text(step.bytes))

    def _list(self, event: Event, k: int | None) -> None:
        """Lists an event of a microbatch, or of none, in the order in which all ranks come to it."""
        shape, amount = self.dims.shape(event.shape), self.dims.text(event.bytes)
        name = event.name if k is None else self.names.in_microbatch(event.name, k)
        tag = self.tags[event.tag] + (k or 0)
        self.events.append(replace(event, tag=tag, name=name, shape=shape, bytes=amount))

    def _of_totals(self, step: CommOp, names: Mapping[str, str], listed: Mapping[str, str], part: int | None) -> CommOp:
        """A message or collective of what makes the batch's numbers, which is listed at its first end."""
        key = step.tag, part
        if key not in self.total_tags:
            assert self.totals is not None
            event = next(one for one in self.totals.events if one.tag == step.tag)
            self.total_tags[key] = self.unused
            self.events.append(replace(event, tag=self.unused, name=listed.get(event.name, event.name)))
            self.unused += 1
        inputs, made = (tuple(names.get(name, name) for name in some) for some in (step.inputs, step.outputs))
        return replace(step, inputs=inputs, outputs=made, tag=self.total_tags[key])

    def _finished(self) -> Program:
        done = {rank: made for row in self.rows for made in [self._program(row)] for rank in row.unit.ranks}
        gone = {PART, *(self.training.totals if self.training else ())}
        parts = [
            replace(
                done[part.rank],
                rank=part.rank,
                inputs=tuple(held for held in part.inputs if held.version.value.name not in gone),
                weights=part.weights,
                outputs=part.outputs,
            )
            for part in self.program.parts
        ]
        own, more = self.program, self.totals
        if more is not None:
            parts = [_with_weights(part, other) for part, other in zip(parts, more.parts, strict=True)]
        values = {
            value: replace(info, shape=self.records.global_shape(value, info.shape))
            for value, info in own.values.items()
        }
        return replace(
            own,
            parts=tuple(parts),
            events=tuple(self.events),
            groups={**(more.groups if more else {}), **own.groups},
            paths={**(more.paths if more else {}), **own.paths},
            placement={**(more.placement if more else {}), **own.placement},
            targets={**(more.targets if more else {}), **own.targets},
            choices={**(more.choices if more else {}), **own.choices},
            values={**(more.values if more else {}), **values},
            symbols=self.dims.symbols,
            training=_of_step(self.training),
        )

    def _program(self, row: Row) -> RankProgram:
        like = row.unit.program
        kept = tuple(one for one in like.kept if one.kind != "gradient")
        types = dict(row.types)
        for held in self.records.inputs(row.unit):
            value, shape = like.types[held.name]
            types[held.name] = value, self.records.shape(held, shape)
        given = [held.name for held in (*like.inputs, *like.weights)] + [one.name for one in kept]
        there = {*given, *(name for step in row.steps for name in made_names(step))}
        used = {name for step in row.steps for name in read_names(step)} | {held.name for held in like.outputs}
        used.update(name for body in row.bodies.values() for step in body.steps for name in read_names(step))
        return replace(
            like,
            steps=tuple(row.steps),
            types={name: one for name, one in types.items() if name in there},
            constants={name: one for name, one in row.constants.items() if name in used},
            kept=kept,
        )


def _with_weights(part: RankProgram, totals: RankProgram) -> RankProgram:
    """A rank's program with the weights that only the numbers of the whole batch are made of."""
    there = {held.name for held in (*part.inputs, *part.weights)} | {one.name for one in part.kept}
    more = tuple(held for held in totals.weights if held.name not in there)
    types = {held.name: totals.types[held.name] for held in more}
    return replace(part, weights=(*part.weights, *more), types={**part.types, **types}) if more else part


def _of_step(training: Training | None) -> Training | None:
    """A training whose step is that of the whole batch."""
    if training is None:
        return None
    scalars = tuple(name for name in training.scalars if name != PART)
    return replace(training, accumulate=1, totals=(), scalars=scalars, summed=frozenset())
