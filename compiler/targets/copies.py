"""Pass: copies each value to the targets of its readers, once for each value and target, and groups ops in runs of one target.

    %h = Relu(%x)  on cuda            %h.cuda = Relu(%x.cuda)
    Send(%h)                          %h = Copy(%h.cuda) {to: cpu}
                                      Send(%h)

What a rank has on cpu keeps the name, by which other ranks know messages, collectives and outputs; on another target it is `h.cuda`. A
tensor of the state keeps its name wherever it lies. A copy stands in the body of the task that makes the value where each call's is read
so, else in the row.

What nothing reads falls away before copies are written: its operands would be brought to its target for nothing.

    %s = Shape(%h)     made of the sizes of inputs     ->     %h = Gather(%table, %ids) on a rank that needs its shape alone is left out

A replicated group computes forward what the backward pass of one of its ranks reads by its shape alone.

Nodes that are constants become constants of the rank's program: these lie wherever they are read, and every session sees them.

A constant that is an output, or that a task gives, stays a node; so does one that numpy has no type for.

Shapes of a rank's values are made of those of its inputs, at the begin: a rank then need not leave its target to compute with them.

    %s = Shape(%h)    of (batch, 4, 6)     ->     %x.size.0 = Shape(%x) {start: 0, end: 1}     %s = Concat(%x.size.0, [4, 6])

Every dim must be a number, or that of an input of the rank. What is computed with such shapes stands at the begin, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.program import Complete, Scheduled
from partc.compiler.ir.programs import (
    Body,
    Call,
    Comm,
    Compute,
    Copy,
    Op,
    RankProgram,
    TaskKind,
    Value,
    added,
    exchanged,
    needed,
    with_values,
)
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import Array, Dim, Shape, ValueInfo, bytes_text
from partc.compiler.ops.registry import draws
from partc.compiler.pipelines.gathers import most_gathered, peaks_of
from partc.compiler.targets.of_ops import ANYWHERE, GROWING, Scope, TargetAssignment, is_of_shape, placed
from partc.compiler.targets.order import in_runs
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.graph.kernels import host_inputs

OneOp = TypeVar("OneOp", bound=Op)
_PLAIN = frozenset(
    kind
    for kind in ir.DataType
    if kind.name
    in ("FLOAT", "DOUBLE", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)


def with_constants(part: RankProgram) -> RankProgram:
    """The program with constants in place of ops Constant."""
    constants: dict[Value, Value] = {}
    bodies: dict[Body, Body] = {}
    for body in part.bodies:
        inside = [step for step in _without(body.steps, body.outputs, constants) if not isinstance(step, Call)]
        bodies[body] = replace(body, steps=tuple(inside))
    given = {*part.live_out, *(value for step in part.steps if isinstance(step, Call) for value in step.inputs)}
    steps = _without(part.steps, given, constants)
    if not constants:
        return part
    bodies = {
        old: replace(new, steps=tuple(_over(step, constants) for step in new.steps)) for old, new in bodies.items()
    }
    steps = [replace(step, body=bodies[step.body]) if isinstance(step, Call) else step for step in steps]
    return replace(part, steps=tuple(_over(step, constants) for step in steps))


def _without(steps: Sequence[Op], given: Collection[Value], constants: dict[Value, Value]) -> list[Op]:
    """The ops without constants, whose values `constants` gets as constants; but for those that are `given` to others."""
    kept: list[Op] = []
    for step in steps:
        array = _array(step) if isinstance(step, Compute) and not step.captured else None
        if array is None or any(value in given for value in step.makes):
            kept.append(step)
        else:
            (value,) = step.makes
            constants[value] = replace(value, constant=array)
    return kept


def _over(step: OneOp, values: Mapping[Value, Value]) -> OneOp | Compute | Comm:
    """The op, which reads constants in place of what ops gave."""
    if isinstance(step, Compute):
        return with_values(step, values)
    return replace(step, inputs=exchanged(step.inputs, values)) if isinstance(step, Comm) else step


def _array(step: Compute) -> Array | None:
    """The value of a constant; None for any other op."""
    if not step.is_op("Constant") or not step.makes:
        return None
    tensor = ir.convenience.get_const_tensor(step.node.outputs[0])
    return tensor.numpy() if tensor is not None and tensor.dtype in _PLAIN else None


def without_unread(part: RankProgram) -> RankProgram:
    """The program with the ops whose results are read, in tasks, too, and the weights that these read."""
    bodies: dict[Body, Body] = {}
    for body in part.bodies:
        inside = [step for step in needed(body.steps, body.outputs) if not isinstance(step, Call)]
        bodies[body] = replace(body, steps=tuple(inside)) if len(inside) < len(body.steps) else body
    steps = needed(part.steps, part.live_out)
    if len(steps) == len(part.steps) and all(one is other for one, other in bodies.items()):
        return part
    steps = [replace(step, body=bodies[step.body]) if isinstance(step, Call) else step for step in steps]
    every: list[Op] = [*steps, *(step for body in bodies.values() for step in body.steps)]
    used = {*part.live_out, *(value for step in every for value in step.reads)}
    return replace(part, steps=tuple(steps), weights=tuple(held for held in part.weights if held.value in used))


def copy_between_targets(program: Scheduled) -> Complete:
    """The programs of ranks with copies, their ops and tensors of the state with targets; as it is where no target is named."""
    if not program.targets:
        return program.into(Complete)
    by_share_key: dict[Hashable, RankProgram] = {}
    parts: list[RankProgram] = []
    number = ir.Value(name="scalar", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    step = program.other_programs.get(ProgramKind.STEP)
    program = replace(program, values={**program.values, number: ValueInfo("tensor(float)", (), 4)})
    for part in program.parts:
        if part.share_key not in by_share_key:
            own = without_unread(with_shapes_of_inputs(program, with_constants(part)))
            there = () if step is None else step.parts[part.rank].state
            found = placed(program, own, {one.version.across: one.target for one in there if one.target})
            by_share_key[part.share_key] = _Copying(program, own, found, number).done()
        parts.append(replace(by_share_key[part.share_key], rank=part.rank, inputs=part.inputs, outputs=part.outputs))
    stored = program.stored
    if stored is not None and program.tasks is None:  # ops are in another order
        peaks = peaks_of({part.rank: most_gathered(_without_copies(part), program.gathered) for part in parts})
        stored = stored.model_copy(update={"peaks": peaks})
    return program.into(Complete, parts=tuple(parts), stored=stored)


def _without_copies(part: RankProgram) -> list[Op]:
    """The ops as a rank file lists them: what reads a copy reads the value itself."""
    values: dict[Value, Value] = {}
    for step in part.steps:
        if isinstance(step, Copy):
            values[step.output] = values.get(step.source, step.source)
    return [_over(step, values) for step in part.steps if not isinstance(step, Copy)]


@dataclass
class _TargetCopies:
    """The values of a scope on each target; `fixed` ones are not copied on their own target."""

    scope: Scope
    fixed: set[Value]
    typed: Mapping[Value, tuple[ir.Value, Shape]]
    """The types of values that have none of their own: of the numbers that each step is given."""
    needs: dict[Value, dict[str, Op | None]] = field(default_factory=dict)
    """Maps each value to the other targets on which it is read, each with its first reader."""
    copies: dict[tuple[Value, str], Value] = field(default_factory=dict)
    leaving: set[Value] = field(default_factory=set)
    """Values of a row that a body gives as copies on cpu."""

    def need(self, value: Value, target: str, reader: Op | None) -> None:
        """Notes that a value is read on a target."""
        if self.scope.locations.get(value, ANYWHERE) not in (ANYWHERE, target):
            self.needs.setdefault(value, {}).setdefault(target, reader)

    def leaves(self, value: Value) -> bool:
        """Whether the value itself is its copy on cpu."""
        if value in self.leaving:
            return True
        lies_there = self.scope.locations.get(value, ANYWHERE) == CPU
        return not lies_there and CPU in self.needs.get(value, ()) and value not in self.fixed

    def at(self, value: Value, target: str) -> Value:
        """A value on a target: itself or, of its name and the target's, another one."""
        lying, leaves = self.scope.locations.get(value, ANYWHERE), self.leaves(value)
        if lying == ANYWHERE or (target == CPU and leaves) or (target == lying and not leaves):
            return value
        if (value, target) not in self.copies:
            of, shape = self.typed.get(value, (value.of, value.shape))
            self.copies[value, target] = replace(value.derived(f".{target}"), of=of, shape=shape)
        return self.copies[value, target]


class _Copying:
    def __init__(self, program: Scheduled, part: RankProgram, assignment: TargetAssignment, number: ir.Value) -> None:
        self.program, self.part, self.assignment = program, part, assignment
        self.typed: dict[Value, tuple[ir.Value, Shape]] = dict.fromkeys(part.scalars, (number, ()))
        calls = [step for step in part.steps if isinstance(step, Call)]
        self.calls = {body: [call for call in calls if call.body is body] for body in assignment.bodies}
        self.row = _TargetCopies(assignment.row, {*part.live_in}, self.typed)
        self.bodies = {
            body: _TargetCopies(inner, {*body.inputs}, self.typed) for body, inner in assignment.bodies.items()
        }
        self.requested = {body: self._wanted(body) for body in assignment.bodies}
        self.outputs_at: dict[Body, dict[Value, list[str]]] = {}
        """Maps each body and output to the targets on which the body makes it."""
        self.makers = {value: step for step in part.steps for value in step.makes}

    def done(self) -> RankProgram:
        """The program with its copies."""
        part, row = self.part, self.row
        states = {one.next: self.assignment.row.locations[one.value] for one in part.state if one.next is not None}
        self._note_reads(states)
        bodies = {body: self._body(body) for body in self.assignment.bodies}
        copied: set[tuple[Value, str]] = set()
        for body, calls in self.calls.items():
            for own, targets in self.outputs_at[body].items():
                at = body.outputs.index(own)
                copied.update((call.outputs[at], target) for call in calls for target in targets)
        steps = _Writer(self, row, copied).written(part.steps, bodies)
        kept = tuple(
            replace(
                one,
                target=row.scope.locations[one.value],
                next=None if one.next is None else row.at(one.next, states[one.next]),
            )
            for one in part.state
        )
        updated = {one.value for one in part.state if one.next is not None}
        wanted = {*self.program.model.graph.outputs}
        guard = next((row.at(one.value, CPU) for one in part.outputs if one.version.value not in wanted), None)
        return replace(part, steps=tuple(in_runs(steps, updated, guard)), state=kept)

    def _wanted(self, body: Body) -> dict[Value, list[str]]:
        """Maps each input of a body to the targets on which the body reads it; the first is the input's own target, and the only one
        where the body does not read it.
        """
        scope = self.assignment.bodies[body]
        targets: dict[Value, dict[str, None]] = {own: {} for own in body.inputs}
        for step in body.steps:
            for value, target in scope.reads(step):
                if value in targets and scope.locations[value] != ANYWHERE:
                    targets[value][target] = None
        return {
            own: sorted(some, key=lambda one: one != scope.locations[own]) or [scope.locations[own]]
            for own, some in targets.items()
        }

    def _note_reads(self, states: Mapping[Value, str]) -> None:
        row = self.row
        used: dict[Value, dict[str, None]] = {}

        def note(value: Value, target: str, reader: Op | None) -> None:
            used.setdefault(value, {})[target] = None
            row.need(value, target, reader)

        for step in self.part.steps:
            if isinstance(step, Call):
                for own, value in zip(step.body.inputs, step.inputs, strict=True):
                    for target in self.requested[step.body][own]:
                        note(value, target, step)
                continue
            for value, target in row.scope.reads(step):
                note(value, target, step)
        for held in self.part.outputs:
            note(held.value, CPU, None)
        for value, target in states.items():
            note(value, target, None)
        for body in self.assignment.bodies:
            self._note_body(body, used)

    def _note_body(self, body: Body, used: Mapping[Value, Mapping[str, None]]) -> None:
        """Notes what the ops of a body read, and on which targets it gives its outputs."""
        there, calls = self.bodies[body], self.calls[body]
        for step in body.steps:
            for value, target in there.scope.reads(step):
                if value not in there.fixed:
                    there.need(value, target, step)
        self.outputs_at[body] = {}
        for at, own in enumerate(body.outputs):
            uses = [used.get(call.outputs[at], {}) for call in calls]
            lying = there.scope.locations[own]
            anywhere = dict.fromkeys(target for one in uses for target in one)
            for target in anywhere:
                if all(target in one for one in uses):
                    there.need(own, target, None)
            made = [target for target in anywhere if target == lying or target in there.needs.get(own, ())]
            if any(target not in made for target in anywhere) and lying not in made:
                made.append(lying)  # a copy in the row reads it
            self.outputs_at[body][own] = made or [lying]
            self.row.leaving.update(call.outputs[at] for call in calls if there.leaves(own))

    def _body(self, body: Body) -> Body:
        there, wanted = self.bodies[body], self.requested[body]
        formal = {
            (own, target): own if k == 0 else there.at(own, target)
            for own, targets in wanted.items()
            for k, target in enumerate(targets)
        }
        outputs = [there.at(own, target) for own, targets in self.outputs_at[body].items() for target in targets]
        steps = _Writer(self, there, set(), formal).written(body.steps, {})
        inner = [step for step in in_runs(steps) if not isinstance(step, Call)]
        return replace(body, inputs=tuple(formal.values()), outputs=tuple(outputs), steps=tuple(inner))

    def bytes(self, value: Value) -> str:
        """The bytes of a value, as an expression in the symbols."""
        of, shape = self.typed.get(value, (value.of, value.shape))
        known = of is not None and of in self.program.values
        return bytes_text(self.program.values[of], shape) if known and of is not None else "unknown"

    def cause(self, scope: Scope, value: Value, target: str, reader: Op | None) -> str:
        """Why a value is copied to a target."""
        match reader:
            case Compute():
                path = self.program.paths.get(reader.source, reader.node.name or reader.node.op_type)
                on = "the host" if target == CPU and scope.targets[reader] != CPU else target
                return f"read by {path} on {on}"
            case Comm():
                return f"{reader.op_type} of '{value}'"
            case Call():
                return f"read by {reader.cell} on {target}"
            case _:
                return f"given by the task on {target}" if value not in self.makers else "output"

    def path(self, makers: Mapping[Value, Op], value: Value) -> str:
        """The source of a value."""
        match makers.get(value):
            case Compute() as step:
                return self.program.paths.get(step.source, step.node.name or str(value))
            case Comm() as step:
                return self.program.path_of(step.value)
            case _:
                return str(value)


class _Writer:
    """Writes ops over what their operands are on their targets, each copy in front of its first reader."""

    def __init__(
        self,
        work: _Copying,
        there: _TargetCopies,
        existing: set[tuple[Value, str]],
        formal: Mapping[tuple[Value, str], Value] | None = None,
    ) -> None:
        self.work, self.copies, self.formal = work, there, formal or {}
        self.due: dict[Op | None, list[tuple[Value, str]]] = {}
        """Maps each reader to the copies before it, except for those that bodies have `given`."""
        for value, targets in there.needs.items():
            for target, reader in targets.items():
                if (value, target) not in existing:
                    self.due.setdefault(reader, []).append((value, target))

    def written(self, steps: Iterable[Op], bodies: Mapping[Body, Body]) -> list[Op]:
        """The ops with their copies; calls are those of `bodies`."""
        self.makers = {value: step for step in steps for value in step.makes}
        ops: list[Op] = []
        for step in steps:
            ops += [self._copy(value, target, step) for value, target in self.due.get(step, ())]
            if isinstance(step, Call):
                ops.append(self._call(step, bodies))
            elif isinstance(step, Comm):
                ops.append(
                    replace(step, inputs=exchanged(step.inputs, {one: self._at(one, CPU) for one in step.reads}))
                )
            else:
                assert isinstance(step, Compute)
                ops.append(self._on_target(step))
        return [*ops, *(self._copy(value, target, None) for value, target in self.due.get(None, ()))]

    def _at(self, value: Value, target: str) -> Value:
        return self.formal.get((value, target)) or self.copies.at(value, target)

    def _copy(self, value: Value, target: str, reader: Op | None) -> Copy:
        scope, work = self.copies.scope, self.work
        lying = scope.locations[value]
        return Copy(
            self.copies.at(value, lying),
            self.copies.at(value, target),
            lying,
            target,
            work.path(self.makers, value),
            work.cause(scope, value, target, reader),
            work.bytes(value),
            reader.task if reader is not None and not isinstance(reader, Copy) else TaskKind.UPDATE,
        )

    def _on_target(self, step: Compute) -> Compute:
        """An op with its target, over what its operands are there; what its kernel reads on the host is the host's."""
        scope, host = self.copies.scope, host_inputs(step.node.domain, step.node.op_type)
        target = scope.targets[step]
        if is_of_shape(step):
            target = self._without_copy(step.reads[0]) or target
        outputs = {value: self._at(value, scope.locations[value]) for value in step.makes}
        label = step.label
        return replace(
            step,
            inputs=tuple(
                None if value is None else self._at(value, CPU if k in host else target)
                for k, value in enumerate(step.inputs)
            ),
            outputs=exchanged(step.outputs, outputs),
            captured={name: self._at(value, target) for name, value in step.captured.items()},
            label=label if isinstance(label, str) else outputs.get(label, label),
            target=target,
        )

    def _without_copy(self, value: Value) -> str:
        """A target on which a value is without a copy; empty of a constant."""
        lying = self.copies.scope.locations.get(value, ANYWHERE)
        given = [target for own, target in self.formal if own is value]
        return lying if lying in given or not given else given[0]

    def _call(self, call: Call, bodies: Mapping[Body, Body]) -> Call:
        body, work = call.body, self.work
        inputs = [
            self.copies.at(value, target)
            for own, value in zip(body.inputs, call.inputs, strict=True)
            for target in work.requested[body][own]
        ]
        outputs = [
            self.copies.at(value, target)
            for own, value in zip(body.outputs, call.outputs, strict=True)
            for target in work.outputs_at[body][own]
        ]
        return replace(call, body=bodies[body], inputs=tuple(inputs), outputs=tuple(outputs))


_WITH_ENDS = 15
"""The opset from which Shape has a begin and an end."""


def with_shapes_of_inputs(program: Scheduled, part: RankProgram) -> RankProgram:
    """The program with shapes that are made of its inputs', in front of all else."""
    if program.model.graph.opset_imports.get("", 1) < _WITH_ENDS:
        return part
    work = _Shapes(part)
    steps = [work.step(step) for step in part.steps]
    if not work.early:
        return part
    first, rest = _parted([*work.early, *steps], work.inputs)
    return replace(part, steps=(*first, *rest))


class _Shapes:
    def __init__(self, part: RankProgram) -> None:
        self.dims: dict[Dim, tuple[Value, int]] = {}
        for held in part.inputs:
            for axis, dim in enumerate(held.value.shape or ()):
                if isinstance(dim, str):
                    self.dims.setdefault(dim, (held.value, axis))
        self.early: list[Op] = []
        self.known: dict[object, Value] = {}
        self.inputs = {held.value for held in part.inputs}

    def step(self, step: Op) -> Op:
        """The op, or in place of a Shape the one that joins the sizes."""
        if not isinstance(step, Compute) or not step.is_op("Shape") or step.inputs[0] is None:
            return step
        shape = step.inputs[0].shape
        if shape is None or step.inputs[0] in self.inputs:
            return step
        begin, end = step.node.attributes.get_int("start", 0), step.node.attributes.get("end")
        dims = shape[begin : end.as_int() if end is not None else None]
        if not dims or any(isinstance(dim, str) and dim not in self.dims for dim in dims):
            return step
        # An op of its own: what has the sizes of a cut value is not cut, and other ranks may have no such inputs.
        made = added("Concat", [self._size(dim) for dim in dims], step.makes, {"axis": 0})
        return replace(step, node=made.node, source=made.node, inputs=made.inputs)

    def _size(self, dim: Dim) -> Value:
        """A dim, as a vector of one number."""
        if dim in self.known:
            return self.known[dim]
        if isinstance(dim, int):
            size = Value(f"size.{dim}", constant=np.array([dim], np.int64))
        else:
            source, axis = self.dims[dim]
            size = source.derived_untyped(f".size.{axis}")
            self.early.append(added("Shape", [source], [size], {"start": axis, "end": axis + 1}))
        self.known[dim] = size
        return size


def _parted(steps: Sequence[Op], inputs: set[Value]) -> tuple[list[Op], list[Op]]:
    """The ops that compute with shapes of inputs alone, and the others, each in order."""
    numbers: set[Value] = set()
    first: list[Op] = []
    rest: list[Op] = []
    for step in steps:
        if isinstance(step, Compute) and _is_early(step, inputs, numbers):
            numbers.update(step.makes)
            first.append(step)
        else:
            rest.append(step)
    return first, rest


def _is_early(step: Compute, inputs: set[Value], numbers: set[Value]) -> bool:
    if step.node.op_type == "Shape":
        return all(value in inputs for value in step.reads)
    if step.node.domain not in ("", "ai.onnx") or step.node.op_type in GROWING or draws(step.node) or step.captured:
        return False
    if step.node.op_type == "Cast" and ir.DataType(step.node.attributes.get_int("to")).is_floating_point():
        return False
    reads = step.reads
    return any(value in numbers for value in reads) and all(
        value in numbers or value.constant is not None for value in reads
    )
