"""The target of every op of a rank's program, and the target whose memory holds each of its values.

    an op of the model, forward or backward     the node's (`choose_targets.py`)
    an update                                   its parameter's
    arithmetic with shapes                      cpu; Shape itself stands where its operand lies, and its result is on cpu
    what reads constants alone                  its first reader's
    what partc adds beside these                where most of its operands lie, of as many the first one's

A value lies on the target of the op that makes it. On cpu lie inputs, scalars, what communication gives and takes, outputs, and operands
that kernels read on the host. A tensor of the state lies where its next value is made, or where it is updated if other ranks send that; a
constant lies wherever it is read (ANYWHERE).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import Body, Call, Comm, Compute, Copy, Op, RankProgram, State, TaskKind, Value
from partc.runtime.artifact.format import CONSTANT, CPU
from partc.runtime.artifact.graph.kernels import host_inputs

ANYWHERE = ""
"""The target of constants, and of values that are computed from them alone, until they have a reader."""
_OF_SHAPE = ("Shape", "Size")
GROWING = ("ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile")
"""Ops whose result may be large however small their operands are."""


@dataclass
class Scope:
    """The ops of a row or of a body with their targets, and where the values lie that they read and make."""

    steps: Sequence[Op]
    locations: dict[Value, str]
    targets: dict[Op, str] = field(default_factory=dict)
    numbers: set[Value] = field(default_factory=set)
    """Values that are arithmetic with shapes."""

    def reads(self, step: Op) -> Iterator[tuple[Value, str]]:
        """The operands of an op, each with the target on which it must be; without constants, and without operands of which only the
        shape is read.
        """
        if isinstance(step, Comm):
            yield from ((value, CPU) for value in step.reads)
        elif isinstance(step, Compute):
            host = host_inputs(step.node.domain, step.node.op_type)
            for k, value in enumerate(step.inputs):
                if value is not None and not is_of_shape(step):
                    yield value, CPU if k in host else self.targets[step]
            yield from ((value, self.targets[step]) for value in step.captured.values())


@dataclass
class TargetAssignment:
    """A rank's program with targets: its row, and by body the scope of it."""

    row: Scope
    bodies: dict[Body, Scope]


def placed(program: Targeted, part: RankProgram, states: Mapping[object, str]) -> TargetAssignment:
    """The targets of a program's ops; `states` is where tensors lie, by their versions (`across`), that it does not replace."""
    return _Placing(program, part, states).done()


def is_of_shape(step: Op) -> bool:
    """Whether an op reads nothing of its operand but the shape."""
    return isinstance(step, Compute) and step.is_op(*_OF_SHAPE)


def _is_tensor(value: Value) -> bool:
    """Whether devices may have a value: a dense tensor of numbers, or one of which nothing is known."""
    kind = value.of.type if value.of is not None else None
    return kind is None or (isinstance(kind, ir.TensorType) and kind.dtype is not ir.DataType.STRING)


class _Placing:
    def __init__(self, program: Targeted, part: RankProgram, states: Mapping[object, str]) -> None:
        self.program, self.part = program, part
        self.scopes: dict[Body, Scope] = {}
        self.forced: dict[Value, str] = {}
        self.makers = {value: step for step in part.steps for value in step.makes}
        lying = dict.fromkeys((held.value for held in part.weights), ANYWHERE)
        lying |= dict.fromkeys((*(held.value for held in part.inputs), *part.scalars), CPU)
        for one in part.state:
            lying[one.value] = self._of_state(one, states)
            self.forced |= {one.next: lying[one.value]} if one.next is not None else {}
        self.row = Scope(part.steps, lying)

    def done(self) -> TargetAssignment:
        """The targets of all ops."""
        self._forward(self.row)
        self._backward(self.row)
        for step in self.part.steps:
            if isinstance(step, Call):
                inner = self.scopes[step.body].locations
                for own, value in zip(step.body.inputs, step.inputs, strict=True):
                    inner[own] = inner[own] or self.row.locations.get(value, ANYWHERE)
        return TargetAssignment(self.row, self.scopes)

    def _of_state(self, held: State, states: Mapping[object, str]) -> str:
        """The target of a tensor of the state: that of its next value, or if that comes from other ranks, of its update."""
        maker = self.makers.get(held.next) if held.next is not None else None
        if isinstance(maker, Compute):
            return self._said(maker) or CPU
        there = states.get(held.version.across, "") if maker is None else ""
        return there or self.program.update_targets.get(held.version.value) or CPU

    def _said(self, step: Compute) -> str:
        """The target that a pass has decided for an op, or for the node of the model that it stands for; empty where none did."""
        return step.target or self.program.targets.get(step.source, "")

    def _forward(self, scope: Scope) -> None:
        for step in scope.steps:
            if isinstance(step, Compute):
                target = self._target(scope, step)
                scope.targets[step] = target
                of_shape = is_of_shape(step)
                if of_shape or (target == CPU and self._is_number(scope, step)):
                    scope.numbers.update(step.makes)
                scope.locations |= dict.fromkeys(step.makes, CPU if of_shape else target)
            elif isinstance(step, Call):
                self._call(scope, step)
            else:
                assert not isinstance(step, Copy)
                scope.locations |= dict.fromkeys(step.makes, CPU)

    def _call(self, scope: Scope, call: Call) -> None:
        body = call.body
        ends = list(zip(body.inputs, call.inputs, strict=True))
        if body not in self.scopes:
            lying = {own: scope.locations.get(value, ANYWHERE) for own, value in ends}
            inner = Scope(body.steps, lying, numbers={own for own, value in ends if value in scope.numbers})
            self.scopes[body] = inner
            self._forward(inner)
            self._backward(inner)
        inner = self.scopes[body]
        for own, value in zip(body.outputs, call.outputs, strict=True):
            scope.locations[value] = inner.locations[own]
            scope.numbers.update([value] if own in inner.numbers else ())

    def _target(self, scope: Scope, step: Compute) -> str:
        if is_of_shape(step):
            return scope.locations.get(step.reads[0], ANYWHERE) or CPU
        if self._is_number(scope, step) or not all(map(_is_tensor, (*step.reads, *step.makes))):
            return CPU
        if said := self._said(step):
            return said
        forced = [self.forced[value] for value in step.makes if value in self.forced]
        if forced:
            return forced[0]
        placement = self.program.placement.get(step.source)
        if placement is not None and placement.rule == CONSTANT and step.task is TaskKind.FORWARD:
            return ANYWHERE
        where = (scope.locations.get(value, ANYWHERE) for value in (*_data(step), *step.captured.values()))
        counts = Counter(one for one in where if one != ANYWHERE)
        return max(counts, key=lambda one: counts[one]) if counts else ANYWHERE

    def _is_number(self, scope: Scope, step: Compute) -> bool:
        """Whether an op computes with shapes: with integers that are made of those alone."""
        node = step.node
        if node.domain not in ("", "ai.onnx") or node.op_type in (*_OF_SHAPE, *GROWING) or step.captured:
            return False
        if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to")).is_floating_point():
            return False
        known = [value for value in _data(step) if scope.locations.get(value, ANYWHERE) != ANYWHERE]
        return bool(known) and all(value in scope.numbers for value in known)

    def _backward(self, scope: Scope) -> None:
        """Gives what reads constants alone the target of its first reader."""
        first: dict[Value, str] = {}
        for step in reversed(scope.steps):
            if isinstance(step, Call):
                wanted = _body_reads(self.scopes[step.body])
                for own, value in zip(step.body.inputs, step.inputs, strict=True):
                    first |= {value: wanted[own]} if own in wanted else {}
                continue
            if isinstance(step, Compute) and scope.targets[step] == ANYWHERE:
                made = [first[value] for value in step.makes if value in first]
                scope.targets[step] = made[0] if made else CPU
                scope.locations |= dict.fromkeys(step.makes, scope.targets[step])
            first |= dict(scope.reads(step))


def _data(step: Compute) -> list[Value]:
    """The operands of an op that its kernel reads where it computes."""
    host = host_inputs(step.node.domain, step.node.op_type)
    return [value for k, value in enumerate(step.inputs) if value is not None and k not in host]


def _body_reads(scope: Scope) -> dict[Value, str]:
    """Maps each value to the first target on which a body's ops read it."""
    found: dict[Value, str] = {}
    for step in scope.steps:
        for value, target in scope.reads(step):
            found.setdefault(value, target)
    return found
