"""Pass: a plan with `pipeline` runs a batch as microbatches, whose tasks follow the plan's schedule.

stages       of nodes, by their placement                                   stages.py
tasks        of the ops that ranks' programs have for one microbatch        phases.py
again        the forward ops that backward tasks repeat                     recompute.py
gathers      of parameters that ranks store in shards                       gathers.py
costs        of tasks: work, bytes that are saved                           task_costs.py
schedule     the order of tasks on each rank: by name, given as rows, or found   schedule/
rows         the programs of a step, over all microbatches: calls of tasks

The programs of one microbatch become rows of calls, in the order of the schedule:

    of one microbatch     x -> Relu -> Send(h)                      Recv(h.grad) -> ... -> Add(w.grad, sum) -> update
    of a step of two      Split(x) 0F0 Send(h.0) 0F1 Send(h.1)      Recv(h.grad.0) 0B0 Recv(h.grad.1) 0B1 -> update

A task is a call of its body (`bodies.py`), which occurs once for any number of microbatches; values that depend on a microbatch have a name
for each. Tasks of all ranks are written in one global order, as ops are everywhere, so that a message comes right after the task that makes
it, on both ranks, and no program can deadlock. Dims are those of the whole batch: `batch` of a microbatch is `batch/2` here.

The gradient of a weight is added up in the bodies: a call takes the sum of the calls before it, the first one zeros.

A loss is the exact sum or mean of those of the microbatches, since the whole batch's denominators are computed first
(`training/microbatch_model.py`). Statistics that a node updates are replaced once, by the mean of the microbatches' updates of the old
ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from partc.compiler.analysis.part_symbols import BatchDims
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Lowered, Scheduled, TaskOrder
from partc.compiler.ir.programs import (
    Body,
    Call,
    Comm,
    Compute,
    Event,
    Op,
    RankProgram,
    RankTensor,
    TaskKind,
    Value,
    exchanged,
    needed,
    with_values,
)
from partc.compiler.ir.training import ProgramKind, Training
from partc.compiler.pipelines.batch_totals import is_per_microbatch, with_inputs, write_totals
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
from partc.compiler.pipelines.gathers import gathers
from partc.compiler.pipelines.phases import UPDATE, Label, Labels, Phase, Place, Unit, labelled, split_backward
from partc.compiler.pipelines.recompute import recompute, undivided
from partc.compiler.pipelines.records import Records
from partc.compiler.pipelines.row import Clones, Row
from partc.compiler.pipelines.stages import NodeStages, in_halves, node_stages
from partc.compiler.pipelines.task_costs import task_costs
from partc.compiler.pipelines.tree_sums import Reduction, TreeSums, reduction
from partc.compiler.plan.pipeline import PipelineRules
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Edge, Stages, grouped
from partc.compiler.schedulers.choose import choose
from partc.compiler.schedulers.named import in_turn
from partc.compiler.training.microbatch_model import PART
from partc.runtime.artifact.tasks.sum_tree import roots, run_of
from partc.runtime.artifact.tasks.task import Kind, Task


def pipeline(program: Lowered) -> Scheduled:
    """Turns the programs of one microbatch into those of a step; raises CompileError if the plan's schedule does not fit."""
    rules, training = program.plan.pipeline, program.training
    stored = bool(program.pinned.units)
    if rules is None or (training is not None and not program.kind.divides) or rules.microbatches == 1:
        if not stored and not (rules is not None and rules.recompute and program.kind.divides):
            return program.into(Scheduled, tasks=None)
        units = _units(program, None)
        labels = labelled(units, node_stages(program))
        if rules is not None and program.kind.divides:
            program, units, labels = recompute(program, units, labels)
        program, units, labels = gathers(program, units, labels, divided=False)
        return undivided(program, units).into(Scheduled, tasks=None)
    totals = program.other_programs.get(ProgramKind.TOTALS)
    if totals is not None:
        program = with_inputs(program, totals)
    units = _units(program, totals)
    stages = node_stages(program)
    labels = labelled(units, stages)
    shape = _stages(stages, labels)
    if not program.stages and shape.is_pointed_vee and _asks_for_vee(rules, len(shape)):
        stages = in_halves(program, stages, len(shape) // 2)
        labels = labelled(units, stages)
        shape = _stages(stages, labels)
    program, units, labels = recompute(program, units, labels)
    program, units, labels = gathers(program, units, labels, divided=True)
    costs = task_costs(program, units, labels, shape, rules.microbatches)
    if rules.accumulates and not shape.is_one_each:
        schedule = in_turn(shape, rules.microbatches)
    else:
        schedule = choose(
            shape, rules.microbatches, rules.schedule, rules.memory, costs, rules.where, rows_where=rules.rows or None
        )
    schedule = schedule.split_alike()
    split_backward(units, labels, {task.stage for row in schedule.rows for task in row if schedule.is_split(task)})
    spans = simulate(schedule, costs).spans
    order = sorted(spans, key=lambda task: spans[task][0])  # as they begin: the one order that all ranks follow
    made = rows_of(program, units, labels, stages, order, rules.microbatches, totals)
    return made.into(Scheduled, tasks=TaskOrder(schedule, costs))


def _asks_for_vee(rules: PipelineRules, stages: int) -> bool:
    """Whether a plan's schedule is that of a V, or has rows with tasks of one stage more than there are."""
    if isinstance(rules.schedule, tuple):
        return any(word.startswith(f"{stages}F") for row in rules.schedule for word in row.split())
    return rules.schedule == "zbv"


def _units(program: Lowered, totals: Lowered | None) -> list[Unit]:
    """Groups the ranks by their ops, both in a microbatch and for the batch's totals."""
    before = {part.rank: part.steps for part in totals.parts} if totals else {}
    members: dict[Hashable, list[RankProgram]] = {}
    rules = program.plan.pipeline
    parts = rules.parts if rules is not None else 0
    for part in program.parts:
        run = run_of(part.rank, program.plan.ranks, parts)
        shape = [high - low for low, high in roots((0, parts), run)] if parts else ()
        members.setdefault((part.share_key, id(before.get(part.rank)), *shape), []).append(part)
    units = []
    for some in members.values():
        # Ops may have no reader: of a weight of two groups a gradient, whose sum another rank hands on.
        part = replace(some[-1], steps=tuple(needed(some[-1].steps, some[-1].live_out)))
        units.append(_unit(program, part, [one.rank for one in some], totals is not None and is_per_microbatch(totals)))
    return units


def _unit(program: Lowered, part: RankProgram, ranks: Iterable[int], counts: bool) -> Unit:
    """Returns a unit of ranks; `counts`: whether each microbatch counts for the batch's totals; else inputs of these are not dealt out."""
    read = {value for step in part.steps for value in step.reads} | {held.value for held in part.outputs}
    own = {
        held.value
        for held in part.inputs
        if (held.version.value in program.batch_dims and (counts or held.value in read))
        or held.version.value.name == PART
    }
    sums = {one.value for one in part.state if one.kind == "gradient"}
    return Unit(part, frozenset(ranks), frozenset(own), frozenset(sums), joined=program.training is None)


def _stages(found: NodeStages, labels: Labels) -> Stages:
    """Returns the graph of stages: their dependencies, and which of them have a backward pass."""
    edges = [Edge(a, b, (a, b) in labels.gradients) for a, b in labels.edges | labels.gradients]
    backward = {label.stage for steps in labels.steps for label in steps if label.phase is Phase.BACKWARD}
    return grouped(found.groups, edges, [stage in backward for stage in range(len(found.groups))])


PHASES = {Kind(letter): phase for phase, letter in LETTERS.items()}
"""The phase of each kind of task."""


def rows_of(
    program: Lowered,
    units: Sequence[Unit],
    labels: Labels,
    stages: NodeStages,
    order: Iterable[Task],
    count: int,
    totals: Lowered | None,
) -> Lowered:
    """Returns the program of a whole step; `order`: the tasks of all ranks in sequence, `totals`: the program of the batch's totals."""
    return _Rows(program, units, labels, stages, count, totals).write(order)


class _Rows:
    def __init__(
        self,
        program: Lowered,
        units: Sequence[Unit],
        labels: Labels,
        stages: NodeStages,
        count: int,
        totals: Lowered | None,
    ) -> None:
        self.program, self.units, self.labels, self.count, self.totals = program, units, labels, count, totals
        self.dims = BatchDims(program.symbols, count)
        self.events: list[Event] = []
        self.tags: dict[int, int] = {}
        self.total_tags: dict[tuple[int, int | None], int] = {}
        self.unused = 0
        """The lowest tag that no event has."""
        self.listed = {event.tag: event for event in program.events}
        self.clones = Clones(self.dims)
        self.records = Records(program, units, self.clones)
        self.slots = slots(units, labels, stages)
        self.rows = [Row(unit, self.clones, micro=[{} for _ in range(count)]) for unit in units]
        self.plain: dict[Body, tuple[tuple[Value, ...], tuple[Value, ...]]] = {}
        """Maps each body to its input and output values in the program of one microbatch."""
        self.inlined: list[set[Op]] = []
        """The ops of each unit that occur only in bodies."""
        self.reductions: dict[int, Reduction] = {}
        """Maps the tag of each reduction of sums over parts to the collectives that replace it."""
        if program.plan.pipeline is not None and program.plan.pipeline.parts:
            self._begin_tree_sums(program.plan.pipeline)

    def _begin_tree_sums(self, rules: PipelineRules) -> None:
        """Makes all rows add up by the tree of parts; raises CompileError if a rank does not have a run of the batch's parts."""
        ranks = self.program.plan.ranks
        for row in self.rows:
            row.tree_sums = TreeSums(
                rules.parts, run_of(row.unit.program.rank, ranks, rules.parts), rules.where, row.steps.append
            )
            for held in self.records.inputs(row.unit):
                if self.records.shards(held) != ranks:
                    fact = f"the records of '{held.value}' are not dealt out to all {ranks} ranks"
                    law, help = "each rank has a run of the batch's parts", "write dataset: data_parallel"
                    raise CompileError(Problem(rules.where, fact, law, help))

    def write(self, order: Iterable[Task]) -> Lowered:
        """Returns the program of the step."""
        once: list[Place] = []
        last: list[Place] = []
        for places in self.labels.order:
            label = self.labels.steps[places[0][0]][places[0][1]]
            once += places if label.phase is Phase.ONCE else ()
            last += places if label == UPDATE else ()
        for row in self.rows:
            self.records.deal(row)
        if self.totals is not None:
            summed = self.program.training.records.summed if self.program.training else ()
            write_totals(self.totals, self.rows, self.records, self._of_totals, summed)
        self._make_bodies()
        self._write(
            [place for place in once if self.units[place[0]].steps[place[1]] not in self.inlined[place[0]]], None
        )
        for k, row in enumerate(self.rows):
            row.begin_sums(step for slot in self.slots.values() for step in slot.bodies.get(k, ()))
        for task in order:
            label = Label(PHASES[task.kind], task.stage)
            self._call(label, self.slots.get(label, Slot()), task.microbatch)
        for row, labels in zip(self.rows, self.labels.steps, strict=True):
            self.records.join(row, labels)
        self._write(last, None)
        return self._finished()

    def _make_bodies(self) -> None:
        """Makes the bodies of all tasks, whose events get a tag for each microbatch."""
        beside = readers_beside(self.units, self.labels, self.slots)
        inlined = [Inlined(unit, labels) for unit, labels in zip(self.units, self.labels.steps, strict=True)]
        requested: list[set[Value]] = [set() for _ in self.units]
        for label, slot in self.slots.items():
            for event in slot.events:
                self._refuse_exchange(event)
                if event.tag not in self.tags:
                    self.tags[event.tag] = self.unused
                    self.unused += self.count
            for k, steps in slot.bodies.items():
                row, wanted = self.rows[k], beside[k].get(label, set())
                every, more = inlined[k].among(with_products_added(row.unit, steps, wanted))
                plain = body_of(label, every, wanted)
                own = {value: self.clones.of_batch(value).derived(f".{body_name(label)}") for value in more}
                row.bodies[label] = body = self._of_batch(plain, own)
                self.plain[body] = plain.inputs, plain.outputs
                requested[k].update(plain.inputs)
        for k in range(len(self.rows)):
            inside = {step for slot in self.slots.values() for step in slot.bodies.get(k, ())}
            self.inlined.append(inlined[k].unread(requested[k], inside))

    def _refuse_exchange(self, event: Comm) -> None:
        """Raises CompileError for communication within a task if the plan has `parts`, which are computed separately."""
        rules = self.program.plan.pipeline
        if rules is None or not rules.parts:
            return
        fact = f"{event.op_type} of '{event.value.name}' ({self.program.path_of(event.value)}) joins parts of a batch: {event.cause}"
        law = "a part is computed by itself, on one rank; only losses and gradients are added up"
        raise CompileError(Problem(rules.where, fact, law, "leave out 'parts', or what places or cuts it"))

    def _of_batch(self, body: Body, own: Mapping[Value, Value]) -> Body:
        """Returns a body in the dims of the whole batch, with its events' tags; `own`: the values that each body has for itself."""
        every = dict.fromkeys(value for step in body.steps for value in (*step.reads, *step.makes))
        values = {value: self.clones.of_batch(value) for value in every if value.constant is None}
        values |= own
        steps: list[Compute | Comm] = []
        for step in body.steps:
            if isinstance(step, Comm):
                steps.append(self._moved(step, values, 0))
            elif isinstance(step, Compute):
                steps.append(with_values(step, values))
        return replace(
            body,
            inputs=tuple(values.get(value, value) for value in body.inputs),
            outputs=tuple(values[value] for value in body.outputs),
            steps=tuple(steps),
        )

    def _call(self, label: Label, slot: Slot, k: int) -> None:
        """Writes a task of a microbatch: the calls of all its ranks, then the events next to them; events are listed in order."""
        for event in slot.events:
            self._list(self.listed[event.tag], k)
        for row in self.rows:
            if (body := row.bodies.get(label)) is not None:
                row.steps.append(self._called(row, label, body, k))
                for value in self.plain[body][1]:
                    if row.tree_sums is not None and value in row.sums:
                        row.tree_sums.add(value, self.clones.of_batch(value), k, row.micro[k][value])
        for places in slot.beside:
            for at, place in places:
                moved = self._copied(self.rows[at], self.units[at].steps[place], k)
                cell = f"{label.stage}{LETTERS[label.phase]}{k}"
                self.rows[at].steps.append(replace(moved, cell=cell) if isinstance(moved, Comm) else moved)

    def _called(self, row: Row, label: Label, body: Body, k: int) -> Call:
        values = row.micro[k]
        row.calls[label] = row.calls.get(label, 0) + 1
        given, results = self.plain[body]
        sums = {kept: now for value in results if value in row.sums for now, kept in [row.sums[value]]}
        inputs = tuple(sums.get(value) or values.get(value) or self.clones.of_batch(value) for value in given)
        for value in results:
            # the last sum is what it is without microbatches, which messages bring to other ranks
            is_last = value in row.sums and row.calls[label] == self.count and row.tree_sums is None
            values[value] = self.clones.of_batch(value) if is_last else self.clones.in_microbatch(value, k)
            if value in row.sums and row.tree_sums is None:
                row.sums[value] = values[value], row.sums[value][1]
        kind = TaskKind.FORWARD if label.phase is Phase.FORWARD else TaskKind.BACKWARD
        return Call(body, k, inputs, tuple(values[value] for value in results), kind)

    def _write(self, places: Iterable[Place], k: int | None) -> None:
        """Writes ops of all ranks once, in the order common to all ranks."""
        for at, place in places:
            row, step = self.rows[at], self.units[at].steps[place]
            if row.tree_sums is not None and row.tree_sums.reads(step):
                if isinstance(step, Comm):
                    row.tree_sums.reduce(step, self._reduction(step), self.clones.of_batch)
                continue
            if isinstance(step, Comm) and step.tag not in self.tags:
                self.tags[step.tag] = self.unused
                self.unused += 1
                self._list(self.listed[step.tag], None)
            if isinstance(step, Compute) and row.unit.adds_up(step):
                if row.tree_sums is not None:
                    fact = f"'{step.makes[0]}' is the same in all parts"
                    law = "the bits are to be the same on any number of ranks"
                    raise CompileError(
                        Problem(row.tree_sums.where, fact, law, "leave it out of the loss, or leave out 'parts'")
                    )
                row.add_alike(step)
            elif isinstance(step, Compute) and row.unit.appends(step):
                row.append_all(step)
            else:
                row.steps.append(self._copied(row, step, k))

    def _reduction(self, step: Comm) -> Reduction:
        """Returns the collectives that replace a reduction of sums over parts; their events are listed when the first rank reaches it."""
        if step.tag not in self.reductions:
            event, rules = self.listed[step.tag], self.program.plan.pipeline
            assert rules is not None
            item = self.program.values[event.value].item_bytes or 1
            base = self.clones.of_batch(event.output)
            self.reductions[step.tag] = reduction(event, step, rules.parts, item, base, self._list_new)
        return self.reductions[step.tag]

    def _list_new(self, event: Event) -> int:
        """Lists an event outside of microbatches under a new tag, and returns the tag."""
        tag, self.unused = self.unused, self.unused + 1
        self.events.append(replace(event, tag=tag))
        return tag

    def _copied(self, row: Row, step: Op, k: int | None) -> Op:
        """Returns an op with the values of microbatch `k`, or of the batch if `k` is None."""
        own = row.micro[k] if k is not None else {}
        if k is not None:
            own |= {value: self.clones.in_microbatch(value, k) for value in step.makes}
        values = {value: own.get(value) or self.clones.of_batch(value) for value in (*step.reads, *step.makes)}
        if isinstance(step, Comm):
            return self._moved(step, values, k or 0)
        assert isinstance(step, Compute)
        return with_values(step, values)

    def _moved(self, step: Comm, values: Mapping[Value, Value], k: int) -> Comm:
        """Returns a message or collective with its own tag."""
        inputs, outputs = exchanged(step.inputs, values), exchanged(step.outputs, values)
        return replace(
            step, inputs=inputs, outputs=outputs, tag=self.tags[step.tag] + k, bytes=self.dims.text(step.bytes)
        )

    def _list(self, event: Event, k: int | None) -> None:
        """Lists an event of microbatch `k`, or of the batch if it is None, in the order in which all ranks reach it."""
        shape, amount = self.dims.shape(event.shape), self.dims.text(event.bytes)
        made = self.clones.of_batch(event.output) if k is None else self.clones.in_microbatch(event.output, k)
        tag = self.tags[event.tag] + (k or 0)
        self.events.append(replace(event, tag=tag, output=made, shape=shape, bytes=amount))

    def _of_totals(
        self, step: Comm, values: Mapping[Value, Value], listed: Mapping[Value, Value], part: int | None
    ) -> Comm:
        """Returns a message or collective of the batch's totals; its event is listed at its first end."""
        key = step.tag, part
        if key not in self.total_tags:
            assert self.totals is not None
            event = next(one for one in self.totals.events if one.tag == step.tag)
            self.total_tags[key] = self.unused
            self.events.append(replace(event, tag=self.unused, output=listed.get(event.output, event.output)))
            self.unused += 1
        inputs, outputs = exchanged(step.inputs, values), exchanged(step.outputs, values)
        return replace(step, inputs=inputs, outputs=outputs, tag=self.total_tags[key])

    def _finished(self) -> Lowered:
        done = {rank: made for row in self.rows for made in [self._program(row)] for rank in row.unit.ranks}
        gone = {PART, *(self.program.training.records.totals if self.program.training else ())}
        of_batch = self.clones.of_batch
        weights = {
            key: tuple(replace(held, value=of_batch(held.value)) for held in some)
            for key, some in {id(part.weights): part.weights for part in self.program.parts}.items()
        }
        parts = [
            replace(
                done[part.rank],
                rank=part.rank,
                inputs=tuple(
                    replace(held, value=self.records.of_step(held))
                    for held in part.inputs
                    if held.version.value.name not in gone
                ),
                weights=weights[id(part.weights)],
                outputs=tuple(replace(held, value=self.records.of_step(held)) for held in part.outputs),
            )
            for part in self.program.parts
        ]
        own, more = self.program, self.totals
        if more is not None:
            joined: dict[tuple[int, int], tuple[RankTensor, ...]] = {}
            parts = [_with_weights(part, other, joined) for part, other in zip(parts, more.parts, strict=True)]
        values = {
            value: replace(info, shape=self.dims.shape(info.shape, own.batch_dims.get(value)))
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
            training=_of_step(self.program.training),
        )

    def _program(self, row: Row) -> RankProgram:
        like, of_batch = row.unit.program, self.clones.of_batch
        return replace(
            like,
            steps=tuple(row.steps),
            state=tuple(
                replace(one, value=of_batch(one.value), next=None if one.next is None else of_batch(one.next))
                for one in like.state
                if one.kind != "gradient"
            ),
            concatenated=frozenset(),
        )


def _with_weights(
    part: RankProgram, totals: RankProgram, known: dict[tuple[int, int], tuple[RankTensor, ...]]
) -> RankProgram:
    """Returns a rank's program with the weights that only the batch's totals read; ranks with equal weights share them."""
    key = id(part.weights), id(totals.weights)
    if key not in known:
        there = {str(value) for value in part.live_in}
        more = tuple(held for held in totals.weights if str(held.value) not in there)
        known[key] = (*part.weights, *more) if more else part.weights
    return replace(part, weights=known[key])


def _of_step(training: Training | None) -> Training | None:
    """Returns the training of a step over the whole batch."""
    if training is None:
        return None
    scalars = tuple(name for name in training.scalars if name != PART)
    rules = training.rules.model_copy(update={"accumulate": 1})
    records = replace(training.records, totals=(), summed=frozenset())
    return replace(training, rules=rules, scalars=scalars, records=records)
