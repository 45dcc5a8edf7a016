"""The target of every op of a rank's program, and where each of its values lies.

    an op of the model, forward or backward     the node's (`choose_targets.py`)
    an update                                   its parameter's
    arithmetic with shapes                      cpu; Shape itself stands where its operand lies, and its result is on cpu
    what reads constants alone                  its first reader's
    what partc adds beside these                where most of its operands lie, of as many the first one's

A value lies on the target of the op that makes it. On cpu lie inputs, scalars, what communication gives and takes, outputs, and operands
that kernels read on the host. A tensor of the state lies where its next value is made, a constant wherever it is read (ANYWHERE).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    CopyOp,
    RankOp,
    RankProgram,
    StateTensor,
    TaskBody,
    TaskCall,
    TaskKind,
    captured_names,
    made_names,
    read_names,
)
from partc.compiler.ir.value_info import Shape
from partc.compiler.ops.registry import host_inputs
from partc.runtime.artifact.format import CONSTANT, CPU

ANYWHERE = ""
"""Where constants lie, and what is made of them alone until it has a reader."""
_OF_SHAPE = ("Shape", "Size")
GROWING = ("ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile")
"""Ops whose result may be large however small their operands are."""


@dataclass
class Scope:
    """The ops of a row or of a body with their targets, and where the values lie that they read and make."""

    steps: Sequence[RankOp]
    types: Mapping[str, tuple[ir.Value, Shape | None]]
    lying: dict[str, str]
    targets: dict[RankOp, str] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    """Values that are arithmetic with shapes."""

    def is_tensor(self, name: str) -> bool:
        """Whether devices may have a value: a dense tensor of numbers, or one of which nothing is known."""
        kind = self.types[name][0].type if name in self.types else None
        return kind is None or (isinstance(kind, ir.TensorType) and kind.dtype is not ir.DataType.STRING)

    def reads(self, step: RankOp) -> Iterator[tuple[str, str]]:
        """What an op reads, each with the target on which it must lie; but constants, and what only its shape is asked for."""
        if isinstance(step, CommOp):
            yield from ((name, CPU) for name in step.inputs if name)
        elif isinstance(step, ComputeOp):
            host = host_inputs(step.node)
            for k, value in enumerate(step.node.inputs):
                if value is not None and value.name and not is_of_shape(step):
                    yield value.name, CPU if k in host else self.targets[step]
            yield from ((name, self.targets[step]) for name in captured_names(step))


@dataclass
class Placed:
    """A rank's program with targets: its row, and by body the scope of it."""

    row: Scope
    bodies: dict[TaskBody, Scope]


def placed(program: Program, part: RankProgram, states: Mapping[str, str]) -> Placed:
    """The targets of a program's ops; `states` is where tensors lie that it does not replace."""
    return _Placing(program, part, states).done()


def is_of_shape(step: RankOp) -> bool:
    """Whether an op reads nothing of its operand but the shape."""
    return isinstance(step, ComputeOp) and step.node.op_type in _OF_SHAPE and step.node.domain in ("", "ai.onnx")


class _Placing:
    def __init__(self, program: Program, part: RankProgram, states: Mapping[str, str]) -> None:
        self.program, self.part = program, part
        self.scopes: dict[TaskBody, Scope] = {}
        self.forced: dict[str, str] = {}
        self.makers = {name: step for step in part.steps for name in made_names(step) if name}
        lying = dict.fromkeys((held.name for held in part.weights), ANYWHERE)
        lying |= dict.fromkeys(part.constants, ANYWHERE)
        lying |= dict.fromkeys((*(held.name for held in part.inputs), *part.scalars), CPU)
        for one in part.kept:
            lying[one.name] = self._of_state(one, states)
            self.forced |= {one.next: lying[one.name]} if one.next else {}
        self.row = Scope(part.steps, part.types, lying)

    def done(self) -> Placed:
        """The targets of all ops."""
        self._forward(self.row)
        self._backward(self.row)
        for step in self.part.steps:
            if isinstance(step, TaskCall):
                inner = self.scopes[step.body].lying
                for own, name in zip(step.body.inputs, step.inputs, strict=True):
                    inner[own] = inner[own] or self.row.lying.get(name, ANYWHERE)
        return Placed(self.row, self.scopes)

    def _of_state(self, one: StateTensor, states: Mapping[str, str]) -> str:
        """Where a tensor of the state lies: where its next value is made."""
        maker = self.makers.get(one.next)
        if not one.next or maker is None:
            return states.get(one.name) or self.program.update_targets.get(one.version.value) or CPU
        if isinstance(maker, ComputeOp):
            return self._said(maker) or CPU
        return CPU

    def _said(self, step: ComputeOp) -> str:
        """The target that a pass has decided for an op, or for the node of the model that it stands for; empty where none did."""
        return step.target or self.program.targets.get(step.source, "")

    def _forward(self, scope: Scope) -> None:
        for step in scope.steps:
            if isinstance(step, ComputeOp):
                target = self._target(scope, step)
                scope.targets[step] = target
                of_shape = is_of_shape(step)
                if of_shape or (target == CPU and self._is_number(scope, step)):
                    scope.numbers.update(made_names(step))
                scope.lying |= dict.fromkeys(filter(None, made_names(step)), CPU if of_shape else target)
            elif isinstance(step, TaskCall):
                self._call(scope, step)
            else:
                assert not isinstance(step, CopyOp)
                scope.lying |= dict.fromkeys(filter(None, step.outputs), CPU)

    def _call(self, scope: Scope, call: TaskCall) -> None:
        body = call.body
        if body not in self.scopes:
            lying = dict.fromkeys(self.part.constants, ANYWHERE)
            lying |= {own: scope.lying.get(name, ANYWHERE) for own, name in zip(body.inputs, call.inputs, strict=True)}
            numbers = {own for own, name in zip(body.inputs, call.inputs, strict=True) if name in scope.numbers}
            inner = Scope(body.steps, body.types, lying, numbers=numbers)
            self.scopes[body] = inner
            self._forward(inner)
            self._backward(inner)
        inner = self.scopes[body]
        for own, name in zip(body.outputs, call.outputs, strict=True):
            scope.lying[name] = inner.lying[own]
            scope.numbers.update([name] if own in inner.numbers else ())

    def _target(self, scope: Scope, step: ComputeOp) -> str:
        said, names = self._said(step), (*read_names(step), *made_names(step))
        if is_of_shape(step):
            return scope.lying.get(names[0], ANYWHERE) or CPU
        if self._is_number(scope, step) or not all(scope.is_tensor(name) for name in names):
            return CPU
        if said:
            return said
        forced = [self.forced[name] for name in made_names(step) if name in self.forced]
        if forced:
            return forced[0]
        placement = self.program.placement.get(step.source)
        if placement is not None and placement.rule == CONSTANT and step.task is TaskKind.FORWARD:
            return ANYWHERE
        where = (scope.lying.get(name, ANYWHERE) for name in (*_data(step), *captured_names(step)))
        counts = Counter(one for one in where if one != ANYWHERE)
        return max(counts, key=lambda one: counts[one]) if counts else ANYWHERE

    def _is_number(self, scope: Scope, step: ComputeOp) -> bool:
        """Whether an op computes with shapes: with integers that are made of those alone."""
        node = step.node
        if node.domain not in ("", "ai.onnx") or node.op_type in (*_OF_SHAPE, *GROWING) or captured_names(step):
            return False
        if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to")).is_floating_point():
            return False
        known = [name for name in _data(step) if scope.lying.get(name, ANYWHERE) != ANYWHERE]
        return bool(known) and all(name in scope.numbers for name in known)

    def _backward(self, scope: Scope) -> None:
        """Gives what reads constants alone the target of its first reader."""
        first: dict[str, str] = {}
        for step in reversed(scope.steps):
            if isinstance(step, TaskCall):
                inner = self.scopes[step.body]
                wanted = body_reads(inner)
                for own, name in zip(step.body.inputs, step.inputs, strict=True):
                    first |= {name: wanted[own][0]} if wanted.get(own) else {}
                continue
            if isinstance(step, ComputeOp) and scope.targets[step] == ANYWHERE:
                made = [first[name] for name in made_names(step) if name in first]
                scope.targets[step] = made[0] if made else CPU
                scope.lying |= dict.fromkeys(filter(None, made_names(step)), scope.targets[step])
            first |= dict(scope.reads(step))


def _data(step: ComputeOp) -> list[str]:
    """The operands of an op that its kernel reads where it computes."""
    host = host_inputs(step.node)
    return [
        value.name for k, value in enumerate(step.node.inputs) if value is not None and value.name and k not in host
    ]


def body_reads(scope: Scope) -> dict[str, list[str]]:
    """By value the targets on which a body's ops read it, in the order of their first readers."""
    found: dict[str, dict[str, None]] = {}
    for step in scope.steps:
        for name, target in scope.reads(step):
            found.setdefault(name, {})[target] = None
    return {name: [*some] for name, some in found.items()}
