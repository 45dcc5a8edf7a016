"""Pass: the programs of one microbatch become those of a step of all of them, in the order of a schedule.

    of one microbatch     x -> F -> Send(h)                         Recv(h.grad) -> B -> Add(w.grad, sum) -> update
    of a step of two      Split(x) -> F.0 Send(h.0) F.1 Send(h.1)   Recv(h.grad.0) B.0 Recv(h.grad.1) B.1 Add -> update

Every task is the ops of its label (`phases.py`), with a name per microbatch for all that depends on one. Tasks of all ranks are written in
one global order, as ops are everywhere, so that a message stands right behind the task that makes it, on both ranks, and no program can
deadlock. The dims of the programs are those of the whole batch: `batch` of a microbatch is `batch/2` here.

A loss is a sum or a mean of those of the microbatches, exactly, for the whole batch's denominators are made first (`training/in_parts.py`).
Statistics that a node replaces are replaced once, by the mean over the microbatches of what each makes of the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.part_symbols import of_batch
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read, symbol
from partc.compiler.ir.graph import bodies, captured
from partc.compiler.ir.program import Program, Shape
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    Constant,
    Event,
    LocalTensor,
    RankOp,
    RankProgram,
    read_names,
    with_names,
)
from partc.compiler.ir.training import Training
from partc.compiler.lower.cutting import Cutting
from partc.compiler.schedule.task import Kind, Task
from partc.compiler.tasks.phases import UPDATE, Label, Labels, Phase, Place, Unit, in_order, outputs
from partc.compiler.training.in_parts import PART

PHASES = {Kind.FORWARD: Phase.FORWARD, Kind.BACKWARD: Phase.BACKWARD, Kind.WEIGHT: Phase.WEIGHT}
"""The phase of each kind of task."""


class Names:
    """Names of what is made of a value, the same ones on all ranks, for a message has one name at both ends."""

    def __init__(self, programs: Iterable[RankProgram]) -> None:
        self.taken = {
            name
            for one in programs
            for names in (one.types, one.constants, *(outputs(step) for step in one.steps))
            for name in names
        }
        self.known: dict[tuple[str, str], str] = {}

    def of(self, name: str, suffix: str | int) -> str:
        """`name.suffix`, with primes where a value of any rank is called so."""
        found = self.known.get((name, str(suffix)))
        if found is None:
            found = f"{name}.{suffix}"
            while found in self.taken:
                found += "'"
            self.taken.add(found)
            self.known[name, str(suffix)] = found
        return found


@dataclass
class Row:
    """The program of a step of a unit's ranks while it is written. `micro`: per microbatch the names of what depends on it."""

    unit: Unit
    steps: list[RankOp] = field(default_factory=list)
    types: dict[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    micro: list[dict[str, str]] = field(default_factory=list)
    sums: dict[str, list[int]] = field(default_factory=dict)
    """By the sum of a gradient the microbatches that were added, in order."""

    def emit(self, op_type: str, names: Sequence[str], made: Sequence[str], **attributes: int | ir.Attr) -> None:
        """Writes a node."""
        given = [value for value in attributes.values() if isinstance(value, ir.Attr)]
        given += ir.convenience.convert_attributes({k: v for k, v in attributes.items() if isinstance(v, int)})
        node = ir.Node("", op_type, [ir.Value(name=n) for n in names], given, outputs=[ir.Value(name=n) for n in made])
        node.name = made[0]
        self.steps.append(ComputeOp(node, node))


def rows_of(
    program: Program, units: Sequence[Unit], labels: Labels, order: Iterable[Task], count: int, totals: Program | None
) -> Program:
    """The program of a whole step; `order` are the tasks of all ranks as they follow each other, `totals` makes the batch's numbers."""
    return _Rows(program, units, labels, count, totals).write(order)


class _Rows:
    def __init__(
        self, program: Program, units: Sequence[Unit], labels: Labels, count: int, totals: Program | None
    ) -> None:
        self.program, self.units, self.labels, self.count, self.totals = program, units, labels, count, totals
        self.training, self.given = program.training, program.microbatched
        whole = {name: of_batch(info, count) for name, info in program.symbols.items() if info.parts > 1}
        self.symbols = {**program.symbols, **whole}
        self.known = {name: info.facts for name, info in self.symbols.items()}
        self.shares = {symbol(name): symbol(name) / count for name in whole}
        self.events: list[Event] = []
        self.tags: dict[tuple[bool, int, int | None], int] = {}
        self.listed = {False: {event.tag: event for event in program.events}}
        self.listed[True] = {event.tag: event for event in totals.events} if totals else {}
        self.pieces = math.lcm(
            self.training.pieces if self.training else 1,
            *(self._shards(held) for unit in units for held in (*self._records(unit), *self._joined(unit))),
        )
        self.names = Names(unit.program for unit in units)
        self.records = {held.version.value for unit in units for held in self._records(unit)}
        self.rows = [self._row(unit) for unit in units]

    def _records(self, unit: Unit) -> list[LocalTensor]:
        """The inputs that have records of the batch."""
        return [held for held in unit.program.inputs if held.name in unit.batch and held.name != PART]

    def _joined(self, unit: Unit) -> list[LocalTensor]:
        """The outputs that have records of the batch, where nothing is trained."""
        known = self.given.records if self.given else {}
        own = {held.name for held in unit.program.inputs}
        return [held for held in unit.program.outputs if held.version.value in known and held.name not in own]

    def _along(self, held: LocalTensor) -> int:
        """The dim of the records of an input or output."""
        return self.given.records[held.version.value] if self.given else 0

    def _shards(self, held: LocalTensor) -> int:
        return held.version.layout.num_shards(self._along(held))

    def _row(self, unit: Unit) -> Row:
        like = unit.program
        row = Row(unit, constants=dict(like.constants), micro=[{} for _ in range(self.count)])
        row.types = {name: (value, self._shape(shape)) for name, (value, shape) in like.types.items()}
        return row

    def _shape(self, shape: Shape | None) -> Shape | None:
        """The shape of a value of a microbatch, in the dims of the whole batch."""
        return None if shape is None else tuple(dim if isinstance(dim, int) else self._dim(dim) for dim in shape)

    def _dim(self, text: str, times: int = 1) -> int | str:
        expression = read(text)
        if expression is None or (not self.shares and times == 1):
            return text
        found = normal(times * expression.subs(self.shares, simultaneous=True), self.known)
        return int(found) if found.is_Integer else str(found)

    def write(self, order: Iterable[Task]) -> Program:
        slots: dict[Label, list[Place]] = {}
        for places in self.labels.order:
            for unit, at in places:
                slots.setdefault(self.labels.steps[unit][at], []).append((unit, at))
        if self.totals is not None:
            self._prelude(self.totals)
        for row in self.rows:
            self._deal(row)
        self._write(slots.get(Label(Phase.ONCE), ()), None)
        for task in order:
            self._write(slots.get(Label(PHASES[task.kind], task.stage), ()), task.microbatch)
        for row, labels in zip(self.rows, self.labels.steps, strict=True):
            self._join(row, labels)
        self._write(slots.get(UPDATE, ()), None)
        return self._finished()

    def _write(self, places: Iterable[Place], k: int | None) -> None:
        """Writes ops of all ranks, for a microbatch or once, in the order that all have in common."""
        for at, place in places:
            row, step = self.rows[at], self.units[at].steps[place]
            if k is not None and isinstance(step, ComputeOp) and row.unit.adds_up(step):
                self._add(row, step, k)
            else:
                row.steps.append(self._copied(row, step, k))

    def _add(self, row: Row, step: ComputeOp, k: int) -> None:
        """Adds a gradient to the sum of those of the microbatches before; of the first there is no sum.

        The last sum has the name that it has without microbatches, which messages that bring it to other ranks are listed by.
        """
        (made,) = outputs(step)
        names = [value.name or "" for value in step.node.inputs if value is not None]
        (kept,) = [name for name in names if name in row.unit.sums]
        added = row.sums.setdefault(made, [])
        added.append(k)
        if len(added) > 1:
            row.micro[k][kept] = row.micro[added[-2]][made]
            row.steps.append(self._copied(row, step, k, {made} if len(added) == self.count else ()))
        elif step.node.op_type in ("Add", "Sum"):
            own = [row.micro[k].get(name, name) for name in names if name != kept]
            row.micro[k][made] = own[0]
            if len(own) > 1:
                row.micro[k][made] = self.names.of(made, k)
                row.types[row.micro[k][made]] = row.types[made]
                row.emit("Sum", own, [row.micro[k][made]])
        else:  # rows of a table are added to the sum itself
            value, shape = row.types[kept]
            assert value.dtype is not None
            sizes, zeros = self.names.of(kept, "shape"), self.names.of(kept, "zeros")
            row.constants[sizes], row.types[zeros] = np.array(shape, np.int64), (value, shape)
            tensor = ir.AttrTensor("value", ir.tensor(np.zeros(1, value.dtype.numpy())))
            row.emit("ConstantOfShape", [sizes], [zeros], value=tensor)
            row.micro[k][kept] = zeros
            row.steps.append(self._copied(row, step, k))

    def _copied(self, row: Row, step: RankOp, k: int | None, final: Collection[str] = ()) -> RankOp:
        """An op with the names of a microbatch, or of none; outputs that are `final` keep their name."""
        names = row.micro[k] if k is not None else {}
        if k is not None:
            for name in filter(None, outputs(step)):
                names[name] = name if name in final else self.names.of(name, k)
                if name in row.types:
                    row.types[names[name]] = row.types[name]
        if isinstance(step, CommOp):
            return self._renamed(step, names, False, k)
        inner = dict(step.captured)
        for body in bodies(step.node):
            for value in captured(body):
                there = inner.get(value.name or "", value.name or "")
                if there in names:
                    inner[value.name or ""] = names[there]
        node = with_names(step.node, names)
        if node is not step.node and k is not None and node.name:
            node.name = f"{node.name}.{k}"
        return replace(step, node=node, captured=inner)

    def _renamed(self, step: CommOp, names: Mapping[str, str], total: bool, k: int | None) -> CommOp:
        """A message or collective with its own tag; at its first end it is listed."""
        key = total, step.tag, k
        if key not in self.tags:
            event = self.listed[total][step.tag]
            self.tags[key] = len(self.events)
            shape, amount = event.shape, event.bytes
            if not total:
                shape, amount = self._shape(shape), str(self._dim(amount))
            name = names.get(event.name) or (event.name if k is None else f"{event.name}.{k}")
            self.events.append(replace(event, tag=self.tags[key], name=name, shape=shape, bytes=amount))
        inputs, made = (tuple(names.get(name, name) for name in some) for some in (step.inputs, step.outputs))
        amount = step.bytes if total else str(self._dim(step.bytes))
        return replace(step, inputs=inputs, outputs=made, tag=self.tags[key], bytes=amount)

    def _deal(self, row: Row) -> None:
        """Gives each microbatch its records: of every piece of the batch a share, so that all ranks have the same ones."""
        if PART in row.unit.batch:
            for k, names in enumerate(row.micro):
                names[PART] = self.names.of(PART, k)
                row.constants[names[PART]] = np.array(k, np.int64)
        cutting = self._cutting()
        for held in self._records(row.unit):
            made = [self.names.of(held.name, k) for k in range(self.count)]
            for k, one in enumerate(made):
                row.micro[k][held.name] = one
                row.types[one] = row.types[held.name]
            cutting.cut(held.name, made, self._along(held), self.pieces // self._shards(held))
        self._cut(row, cutting)

    def _cutting(self) -> Cutting:
        return Cutting(self.names.of, self.program.model.opset_imports.get("", 18))

    def _cut(self, row: Row, cutting: Cutting) -> None:
        row.steps += cutting.nodes
        row.constants |= cutting.constants

    def _join_records(self, row: Row) -> None:
        """The outputs of a step that does not train: what has records of microbatches is joined, the rest is the same in all of them."""
        cutting, known = self._cutting(), {held.name for held in self._joined(row.unit)}
        for held in row.unit.program.outputs:
            parts = [names[held.name] for names in row.micro if held.name in names]
            if held.name in known:
                value, shape = row.unit.program.types[held.name]
                along = self._along(held)
                cutting.join(parts, held.name, along, self.pieces // self._shards(held))
                row.types[held.name] = value, self._whole(shape, along)
            elif parts and held.version.value not in self.records:
                row.emit("Identity", parts[:1], [held.name])
        self._cut(row, cutting)

    def _join(self, row: Row, labels: Sequence[Label]) -> None:
        """The outputs of the step, and what replaces statistics, out of those of the microbatches."""
        if self.training is None:
            self._join_records(row)
            return
        like = row.unit.program
        wanted = {held.name: str(held.version.value.name) in self.training.summed for held in like.outputs}
        wanted |= {one.next: False for one in like.kept if one.kind == "statistics" and one.next}
        for step, label in zip(like.steps, labels, strict=True):
            summed = isinstance(step, CommOp) and str(step.value.name) in self.training.summed
            for name in read_names(step) if label == UPDATE else ():
                if name not in row.sums:
                    wanted.setdefault(name, summed)
        for name, summed in wanted.items():
            parts = [names[name] for names in row.micro if name in names]
            if len(parts) < self.count or name not in row.types:
                continue
            dtype = row.types[name][0].dtype
            if dtype is not None and not dtype.is_floating_point():
                row.emit("Identity", parts[:1], [name])  # a counter of steps
            else:
                row.emit("Sum" if summed else "Mean", parts, [name])
            for names in row.micro:
                del names[name]

    def _prelude(self, totals: Program) -> None:
        """The numbers of the whole batch that every microbatch reads."""
        by_rank = {one.rank: one for one in totals.parts}
        units = [by_rank[row.unit.program.rank] for row in self.rows]
        renamed: list[dict[str, str]] = []
        for row, unit in zip(self.rows, units, strict=True):
            given = {held.name for held in (*unit.inputs, *unit.weights)}
            out = {held.name for held in unit.outputs}
            made = [name for step in unit.steps for name in outputs(step) if name]
            names = {name: self.names.of(name, "of_batch") for name in (*made, *unit.constants) if name not in out}
            row.constants |= {names[name]: array for name, array in unit.constants.items()}
            row.types |= {names.get(name, name): one for name, one in unit.types.items() if name not in given}
            renamed.append(names)
        for places in in_order([unit.steps for unit in units]):
            for at, k in places:
                step, names = units[at].steps[k], renamed[at]
                if isinstance(step, CommOp):
                    self.rows[at].steps.append(self._renamed(step, names, True, None))
                else:
                    self.rows[at].steps.append(replace(step, node=with_names(step.node, names)))

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
        values = {value: replace(info, shape=self._global(value, info.shape)) for value, info in own.values.items()}
        return replace(
            own,
            parts=tuple(parts),
            events=tuple(self.events),
            groups={**(more.groups if more else {}), **own.groups},
            paths={**(more.paths if more else {}), **own.paths},
            placement={**(more.placement if more else {}), **own.placement},
            choices={**(more.choices if more else {}), **own.choices},
            values={**(more.values if more else {}), **values},
            symbols=self.symbols,
            training=_of_step(self.training),
        )

    def _global(self, value: ir.Value, shape: Shape | None) -> Shape | None:
        """The global shape of a value; of an input or output it is that of the batch."""
        if self.given and value in self.given.records:
            return self._whole(shape, self.given.records[value])
        return self._whole(shape, 0) if value in self.records else self._shape(shape)

    def _whole(self, shape: Shape | None, along: int) -> Shape | None:
        """The shape of an input or output of the batch, of which that of a microbatch is known."""
        if not shape:
            return shape
        times = [self.count if k == along else 1 for k in range(len(shape))]
        return tuple(
            dim * each if isinstance(dim, int) else self._dim(dim, each) for dim, each in zip(shape, times, strict=True)
        )

    def _program(self, row: Row) -> RankProgram:
        like = row.unit.program
        kept = tuple(one for one in like.kept if one.kind != "gradient")
        types = dict(row.types)
        for held in self._records(row.unit):
            value, shape = like.types[held.name]
            types[held.name] = value, self._whole(shape, self._along(held))
        given = [held.name for held in (*like.inputs, *like.weights)] + [one.name for one in kept]
        there = {*given, *(name for step in row.steps for name in outputs(step))}
        used = {name for step in row.steps for name in read_names(step)} | {held.name for held in like.outputs}
        return replace(
            like,
            steps=tuple(row.steps),
            types={name: one for name, one in types.items() if name in there},
            constants={name: one for name, one in row.constants.items() if name in used},
            kept=kept,
        )


def _of_step(training: Training | None) -> Training | None:
    """A training whose step is that of the whole batch."""
    if training is None:
        return None
    scalars = tuple(name for name in training.scalars if name != PART)
    return replace(training, accumulate=1, totals=(), scalars=scalars, summed=frozenset())
