"""Pass: what lies on another target than its reader's is copied there, once for each value and target; ops stand in runs of one target.

    %h = Relu(%x)  on cuda            %h.cuda = Relu(%x.cuda)
    Send(%h)                          %h = Copy(%h.cuda) {to: cpu}
                                      Send(%h)

What a rank has on cpu keeps the name, by which other ranks know messages, collectives and outputs; on another target it is `h.cuda`. A
tensor of the state keeps its name wherever it lies. A copy stands in the body of the task that makes the value where each call's is
read so, else in the row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    CopyOp,
    RankOp,
    RankProgram,
    TaskBody,
    TaskCall,
    TaskKind,
    made_names,
    read_names,
)
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_bytes import bytes_text
from partc.compiler.ir.value_info import Shape, ValueInfo
from partc.compiler.targets.constants import with_constants
from partc.compiler.targets.needed import without_unread
from partc.compiler.targets.of_ops import ANYWHERE, Placed, Scope, placed
from partc.compiler.targets.order import in_runs
from partc.compiler.targets.renamed import renamed_op
from partc.compiler.targets.shapes import with_shapes_of_inputs
from partc.runtime.artifact.format import CPU


def copy_between_targets(program: Program) -> Program:
    """The programs of ranks with copies, their ops and tensors of the state with targets; as it is where no target is named."""
    if not program.targets or program.kind is ProgramKind.TOTALS:
        return program
    made: dict[Hashable, RankProgram] = {}
    parts: list[RankProgram] = []
    number = ir.Value(name="scalar", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    program = replace(program, values={**program.values, number: ValueInfo("tensor(float)", (), 4)})
    for part in program.parts:
        if part.likeness not in made:
            own = without_unread(with_shapes_of_inputs(program, with_constants(part)))
            own = replace(own, types={**own.types, **dict.fromkeys(own.scalars, (number, ()))})
            made[part.likeness] = _Copying(program, own, placed(program, own, _states(program, part.rank))).done()
        parts.append(replace(made[part.likeness], rank=part.rank, inputs=part.inputs, outputs=part.outputs))
    return replace(program, parts=tuple(parts), has_copies=True)


def _states(program: Program, rank: int) -> dict[str, str]:
    """Where the program of the step has the tensors of the state, of another program over the same ones."""
    begun = program.begun.parts if program.begun is not None else ()
    return {one.name: one.target for one in begun[rank].kept if one.target} if begun else {}


@dataclass
class _Names:
    """What the values of a scope are called on each target; `fixed` ones keep their name where they lie."""

    scope: Scope
    taken: set[str]
    fixed: set[str]
    needs: dict[str, dict[str, RankOp | None]] = field(default_factory=dict)
    """By value the other targets on which it is read, each with the first op that does."""
    known: dict[tuple[str, str], str] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    """Values of a row of which a body calls its copy on cpu so."""

    def need(self, name: str, target: str, reader: RankOp | None) -> None:
        """Notes that a value is read on a target."""
        if self.scope.lying.get(name, ANYWHERE) not in (ANYWHERE, target):
            self.needs.setdefault(name, {}).setdefault(target, reader)

    def leaves(self, name: str) -> bool:
        """Whether the name of a value is that of its copy on cpu."""
        if name in self.leaving:
            return True
        lies_there = self.scope.lying.get(name, ANYWHERE) == CPU
        return not lies_there and CPU in self.needs.get(name, ()) and name not in self.fixed

    def at(self, name: str, target: str) -> str:
        """The name of a value on a target."""
        lying, leaves = self.scope.lying.get(name, ANYWHERE), self.leaves(name)
        if lying == ANYWHERE or (target == CPU and leaves) or (target == lying and not leaves):
            return name
        if (name, target) not in self.known:
            found = f"{name}.{target}"
            while found in self.taken:
                found += "'"
            self.taken.add(found)
            self.known[name, target] = found
        return self.known[name, target]

    def types(self, known: Mapping[str, tuple[ir.Value, Shape | None]]) -> dict[str, tuple[ir.Value, Shape | None]]:
        """Types with those of the names that were made."""
        return {**known, **{own: known[name] for (name, _), own in self.known.items() if name in known}}


class _Copying:
    def __init__(self, program: Program, part: RankProgram, found: Placed) -> None:
        self.program, self.part, self.found = program, part, found
        calls = [step for step in part.steps if isinstance(step, TaskCall)]
        self.calls = {body: [call for call in calls if call.body is body] for body in found.bodies}
        taken = {name for step in part.steps for name in (*read_names(step), *made_names(step))}
        held = {*(one.name for one in (*part.inputs, *part.weights)), *(one.name for one in part.kept), *part.scalars}
        taken.update(held)
        taken.update(name for call in calls for name in call.names.values())
        self.row = _Names(found.row, taken, held)
        self.bodies = {body: _Names(inner, taken, {*body.inputs}) for body, inner in found.bodies.items()}
        self.wanted = {body: self._wanted(body) for body in found.bodies}
        self.given: dict[TaskBody, dict[str, list[str]]] = {}
        """By body and output the targets on which it gives it."""
        self.makers = {name: step for step in part.steps for name in made_names(step)}

    def done(self) -> RankProgram:
        """The program with its copies."""
        part, row = self.part, self.row
        states = {one.next: self.found.row.lying[one.name] for one in part.kept if one.next}
        self._note_reads(states)
        bodies = {body: self._body(body) for body in self.found.bodies}
        copied: set[tuple[str, str]] = set()
        for body, calls in self.calls.items():
            for own, targets in self.given[body].items():
                at = body.outputs.index(own)
                copied.update((call.outputs[at], target) for call in calls for target in targets)
        steps = _Writer(self, row, copied).written(part.steps, bodies)
        kept = tuple(
            replace(one, target=row.scope.lying[one.name], next=one.next and row.at(one.next, states[one.next]))
            for one in part.kept
        )
        updated = {one.name for one in part.kept if one.next}
        wanted = {*self.program.model.graph.outputs}
        guard = next((row.at(one.name, CPU) for one in part.outputs if one.version.value not in wanted), "")
        return replace(part, steps=tuple(in_runs(steps, updated, guard)), types=row.types(part.types), kept=kept)

    def _wanted(self, body: TaskBody) -> dict[str, list[str]]:
        """By input of a body the targets on which it reads it, first the one where it lies, which is all where it reads none."""
        scope = self.found.bodies[body]
        found: dict[str, dict[str, None]] = {own: {} for own in body.inputs}
        for step in body.steps:
            for name, target in scope.reads(step):
                if name in found and scope.lying[name] != ANYWHERE:
                    found[name][target] = None
        return {
            own: sorted(some, key=lambda one: one != scope.lying[own]) or [scope.lying[own]]
            for own, some in found.items()
        }

    def _note_reads(self, states: Mapping[str, str]) -> None:
        row = self.row
        used: dict[str, dict[str, None]] = {}

        def note(name: str, target: str, reader: RankOp | None) -> None:
            used.setdefault(name, {})[target] = None
            row.need(name, target, reader)

        for step in self.part.steps:
            if isinstance(step, TaskCall):
                for own, name in zip(step.body.inputs, step.inputs, strict=True):
                    for target in self.wanted[step.body][own]:
                        note(name, target, step)
                continue
            for name, target in row.scope.reads(step):
                note(name, target, step)
        for held in self.part.outputs:
            note(held.name, CPU, None)
        for name, target in states.items():
            note(name, target, None)
        for body in self.found.bodies:
            self._note_body(body, used)

    def _note_body(self, body: TaskBody, used: Mapping[str, Mapping[str, None]]) -> None:
        """Notes what the ops of a body read, and on which targets it gives its outputs."""
        names, calls = self.bodies[body], self.calls[body]
        for step in body.steps:
            for name, target in names.scope.reads(step):
                if name not in body.inputs:
                    names.need(name, target, step)
        self.given[body] = {}
        for at, own in enumerate(body.outputs):
            uses = [used.get(call.outputs[at], {}) for call in calls]
            lying = names.scope.lying[own]
            anywhere = dict.fromkeys(target for one in uses for target in one)
            for target in anywhere:
                if all(target in one for one in uses):
                    names.need(own, target, None)
            made = [target for target in anywhere if target == lying or target in names.needs.get(own, ())]
            if any(target not in made for target in anywhere) and lying not in made:
                made.append(lying)  # a copy in the row reads it
            self.given[body][own] = made or [lying]
            self.row.leaving.update(call.outputs[at] for call in calls if names.leaves(own))

    def _body(self, body: TaskBody) -> TaskBody:
        names, wanted = self.bodies[body], self.wanted[body]
        formal = {
            (own, target): own if k == 0 else names.at(own, target)
            for own, targets in wanted.items()
            for k, target in enumerate(targets)
        }
        outputs = [names.at(own, target) for own, targets in self.given[body].items() for target in targets]
        steps = _Writer(self, names, set(), formal).written(body.steps, {})
        inner = [step for step in in_runs(steps) if not isinstance(step, TaskCall)]
        types = names.types(body.types)
        return replace(body, inputs=tuple(formal.values()), outputs=tuple(outputs), steps=tuple(inner), types=types)

    def cause(self, scope: Scope, name: str, target: str, reader: RankOp | None) -> str:
        """Why a value is copied to a target."""
        match reader:
            case ComputeOp():
                path = self.program.paths.get(reader.source, reader.node.name or reader.node.op_type)
                on = "the host" if target == CPU and scope.targets[reader] != CPU else target
                return f"read by {path} on {on}"
            case CommOp():
                return f"{reader.op_type} of '{name}'"
            case TaskCall():
                return f"read by {reader.cell} on {target}"
            case _:
                return f"given by the task on {target}" if name not in self.makers else "output"

    def path(self, steps: Mapping[str, RankOp], name: str) -> str:
        """The source of a value."""
        match steps.get(name):
            case ComputeOp() as step:
                return self.program.paths.get(step.source, step.node.name or name)
            case CommOp() as step:
                producer = step.value.producer()
                return self.program.paths[producer] if producer is not None else step.value.name or name
            case _:
                return name


class _Writer:
    """Writes ops by the names that their operands have on their targets, each copy in front of its first reader."""

    def __init__(
        self,
        work: _Copying,
        names: _Names,
        there: set[tuple[str, str]],
        formal: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        self.work, self.names, self.there, self.formal = work, names, there, formal or {}
        """`there`: the copies that bodies make."""
        self.due: dict[RankOp | None, list[tuple[str, str]]] = {}
        for name, targets in names.needs.items():
            for target, reader in targets.items():
                if (name, target) not in there:
                    self.due.setdefault(reader, []).append((name, target))

    def written(self, steps: Iterable[RankOp], bodies: Mapping[TaskBody, TaskBody]) -> list[RankOp]:
        """The ops with their copies; calls are those of `bodies`."""
        self.makers = {name: step for step in steps for name in made_names(step)}
        found: list[RankOp] = []
        for step in steps:
            found += [self._copy(name, target, step) for name, target in self.due.get(step, ())]
            found.append(self._call(step, bodies) if isinstance(step, TaskCall) else self._renamed(step))
        return [*found, *(self._copy(name, target, None) for name, target in self.due.get(None, ()))]

    def _at(self, name: str, target: str) -> str:
        return self.formal.get((name, target)) or self.names.at(name, target)

    def _copy(self, name: str, target: str, reader: RankOp | None) -> CopyOp:
        scope, program = self.names.scope, self.work.program
        lying = scope.lying[name]
        value, shape = scope.types.get(name, (None, None))
        size = bytes_text(program.values[value], shape) if value is not None and value in program.values else "unknown"
        return CopyOp(
            self.names.at(name, lying),
            self.names.at(name, target),
            lying,
            target,
            self.work.path(self.makers, name),
            self.work.cause(scope, name, target, reader),
            size,
            reader.task if reader is not None and not isinstance(reader, CopyOp) else TaskKind.UPDATE,
        )

    def _renamed(self, step: RankOp) -> RankOp:
        scope = self.names.scope
        if isinstance(step, CommOp):
            inputs = tuple(self._at(name, CPU) if name else "" for name in step.inputs)
            return replace(step, inputs=inputs)
        assert isinstance(step, ComputeOp)
        return renamed_op(step, scope, self._at, self._there)

    def _there(self, name: str) -> str:
        """A target on which a value is without a copy; empty of a constant."""
        lying = self.names.scope.lying.get(name, ANYWHERE)
        given = [target for own, target in self.formal if own == name]
        return lying if lying in given or not given else given[0]

    def _call(self, call: TaskCall, bodies: Mapping[TaskBody, TaskBody]) -> TaskCall:
        body, work = call.body, self.work
        inputs = [
            self.names.at(name, target)
            for own, name in zip(body.inputs, call.inputs, strict=True)
            for target in work.wanted[body][own]
        ]
        outputs = [
            self.names.at(name, target)
            for own, name in zip(body.outputs, call.outputs, strict=True)
            for target in work.given[body][own]
        ]
        return replace(call, body=bodies[body], inputs=tuple(inputs), outputs=tuple(outputs))
