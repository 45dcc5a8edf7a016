"""Programs of ranks: ops in order over values, which get their names when files are written (`emit/names.py`).

Compute   %h = Relu(%x)                          a node in local shapes
Comm      %h = AllReduce(%h.partial) group=0-3   a message or a collective; `tag` is that of its `Event`
Copy      %h = Copy(%h.cuda) to=cpu              a value from one of the rank's targets to another
Call      %h.3 = F0(%x.3, %w)                    a task of one microbatch: its body, with values in place of the body's own

A value is identified by its object; its name, its type and the op that makes it are attributes, or are looked up. So an op can be copied
over other values (`with_values`) without any name being looked up or made unique.

Builds nodes out of ops over values of the job: maps each value of a node to its value in the job, whatever the two are called.

w, dw, lr = (values.of(one) for one in (weight, gradient, rate)) values.ops([update_node(w, dw, lr)])
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar

import onnx_ir as ir
from partc.compiler.ir.constants import Constant
from partc.compiler.ir.sharded import ShardedValue, Way
from partc.compiler.ir.value_info import Shape
from partc.runtime.artifact.format import Law


class TaskKind(StrEnum):
    """The task of a step to which an op belongs, by the letter that a schedule writes: `2F0`."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    """The reduction of the parameters' gradients, and the update: once a step, for any number of microbatches."""


@dataclass(eq=False, slots=True)
class Value:
    """A value that ranks have under one name; its identity is the object.

    `hint`: its proposed name, or if it has a `base`, the suffix after the base's name. `others`: further proposals if that name is taken.
    `of`: the model's value of which it is a version, with its type; None if only the op's own inference knows the type. `shape`: the local
    shape.
    """

    hint: str
    base: Value | None = None
    of: ir.Value | None = None
    shape: Shape | None = None
    constant: Constant | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.hint if self.base is None else f"{self.base}{self.hint}"

    def derived(self, suffix: str) -> Value:
        """Returns a new value of the same type and shape, named after this one."""
        return Value(suffix, self, self.of, self.shape)

    def derived_untyped(self, suffix: str, constant: Constant | None = None) -> Value:
        """Returns a new value of another type, named after this one."""
        return Value(suffix, self, constant=constant)


Operands: TypeAlias = tuple[Value | None, ...]
"""The operands or the results of an op; None for an operand that is absent."""


@dataclass(frozen=True, eq=False)
class Compute:
    """A node over values; `source` is the model's node for which it stands, and `node` gives only its op, attributes and bodies.

    `captured`: maps the names in the node's bodies to the outer values that they read. `label`: the name of the node, or the value after
    which it is named. `again`: the line of the plan for which a forward op is recomputed in the backward task. `target`: the kind of device
    that runs it; empty if that is not decided, or there is only one.
    """

    node: ir.Node
    source: ir.Node
    inputs: Operands
    outputs: Operands
    captured: Mapping[str, Value] = field(default_factory=dict)
    label: str | Value = ""
    task: TaskKind = TaskKind.FORWARD
    again: str = ""
    target: str = ""

    @cached_property
    def reads(self) -> tuple[Value, ...]:
        """The values that it reads, including those captured by bodies."""
        return (*[one for one in self.inputs if one is not None], *self.captured.values())

    @cached_property
    def makes(self) -> tuple[Value, ...]:
        """The values that it makes."""
        return tuple([one for one in self.outputs if one is not None])

    def is_op(self, *op_types: str) -> bool:
        """Whether it is a node with one of these ONNX ops."""
        return self.node.op_type in op_types and self.node.domain in ("", "ai.onnx")


@dataclass(frozen=True, eq=False)
class Comm:
    """A message or a collective, by the op's name in the artifact; `tag` distinguishes events.

    `bytes`: the bytes that the rank sends (Send) or receives, an expression in the symbols. `cell`: if it is between tasks, the task whose
    value it moves, as a schedule writes it.
    """

    op_type: str
    inputs: Operands
    outputs: Operands
    attributes: Mapping[str, int | str | tuple[int, ...]]
    tag: int
    value: ir.Value
    cause: str
    bytes: str
    task: TaskKind = TaskKind.FORWARD
    cell: str = ""

    @cached_property
    def reads(self) -> tuple[Value, ...]:
        """The values that it sends."""
        return tuple([one for one in self.inputs if one is not None])

    @cached_property
    def makes(self) -> tuple[Value, ...]:
        """The values that it receives."""
        return tuple([one for one in self.outputs if one is not None])


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of the value `source` as `output` on another target; `path` is that of the node that makes the value.

    `bytes`: an expression in the symbols; `unknown` if the bytes are known only at run time.
    """

    source: Value
    output: Value
    origin: str
    target: str
    path: str
    cause: str
    bytes: str
    task: TaskKind = TaskKind.FORWARD

    @property
    def reads(self) -> tuple[Value, ...]:
        """The value on the one target."""
        return (self.source,)

    @property
    def makes(self) -> tuple[Value, ...]:
        """The value on the other target."""
        return (self.output,)


@dataclass(frozen=True, eq=False)
class Body:
    """The ops of a task for any of its microbatches; `stage` and `kind` (F, B, W) are those of the schedule.

    In microbatch k an event of the body has the tag `tag + k`, and a value v that stays inside is called `v.k`.
    """

    stage: int
    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    steps: tuple[Compute | Comm | Copy, ...]

    @property
    def name(self) -> str:
        """The name of the function in a rank file: `F0`."""
        return f"{self.kind}{self.stage}"


@dataclass(frozen=True, eq=False)
class Call:
    """A task of one microbatch; `inputs` and `outputs` are its values in place of the body's inputs and outputs."""

    body: Body
    microbatch: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    task: TaskKind = TaskKind.FORWARD

    @property
    def cell(self) -> str:
        """The task as a schedule writes it: `0F3`."""
        return f"{self.body.stage}{self.body.kind}{self.microbatch}"

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that it reads."""
        return self.inputs

    @property
    def makes(self) -> tuple[Value, ...]:
        """The values that it makes."""
        return self.outputs

    @property
    def ends(self) -> dict[Value, Value]:
        """Maps each input and output value of the body to its value in the row."""
        return dict(zip((*self.body.inputs, *self.body.outputs), (*self.inputs, *self.outputs), strict=True))


Op: TypeAlias = Compute | Comm | Copy | Call


def with_values(step: Compute, new: Mapping[Value, Value]) -> Compute:
    """Returns an op with its values replaced by `new`, including those that its bodies read; the op itself if it has none of them."""
    if new.keys().isdisjoint((*step.reads, *step.makes)):
        return step
    label = step.label
    return replace(
        step,
        inputs=exchanged(step.inputs, new),
        outputs=exchanged(step.outputs, new),
        captured={name: new.get(one, one) for name, one in step.captured.items()},
        label=label if isinstance(label, str) else new.get(label, label),
    )


def exchanged(values: Operands, new: Mapping[Value, Value]) -> Operands:
    """Returns operands, with those in `new` replaced."""
    return tuple([None if one is None else new.get(one, one) for one in values])


def added(
    op_type: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    attributes: Mapping[str, int | ir.Attr] | None = None,
) -> Compute:
    """Returns an op that partc adds: it stands for no node of the model, and is named after its first result."""
    given = [one for one in (attributes or {}).values() if isinstance(one, ir.Attr)]
    numbers = {name: one for name, one in (attributes or {}).items() if isinstance(one, int)}
    node = ir.Node("", op_type, [], [*given, *ir.convenience.convert_attributes(numbers)], num_outputs=len(outputs))
    for out in node.outputs:
        out.name = ""
    return Compute(node, node, tuple(inputs), tuple(outputs), label=outputs[0])


@dataclass(frozen=True)
class Event:
    """A message or collective as all its ranks see it: `ranks` are the source and target of a message, or the sets of a collective.

    For messages that are one op `ranks` are the pairs, and `group` is their name.

    `output`: its result, or for an op without one its operand. `derived`: whether it is a reshard for a reader with a derived sharding.
    """

    tag: int
    op_type: str
    value: ir.Value
    output: Value
    ranks: tuple[tuple[int, ...], ...]
    group: str
    shape: Shape | None
    bytes: str
    cause: str
    derived: bool = False
    way: Way | None = None
    """The layouts of the value before and after a collective."""

    @property
    def name(self) -> str:
        """The name of its result in texts."""
        return str(self.output)


@dataclass(frozen=True)
class RankTensor:
    """A model input, weight or output on a rank: its value, its version, whose layout gives the rank's shard by its place in the group."""

    value: Value
    version: ShardedValue
    index: int


@dataclass(frozen=True)
class State:
    """A tensor that ranks keep from step to step, and the value that replaces it after a step, or None if it does not change.

    Each rank of `version` has its shard. `tensor`: its global name. `parameter`: the parameter to which an optimizer's tensor belongs.
    """

    value: Value
    version: ShardedValue
    next: Value | None
    tensor: str
    kind: Literal["parameter", "optimizer", "statistics", "gradient", "scale", "rest", "cache", "adapter"]
    parameter: str = ""
    initial: float | Law = 0.0
    target: str = ""
    """The kind of device that stores it, if ranks have several."""


@dataclass(frozen=True)
class RankProgram:
    """One rank's program: its ops in order, the inputs that it reads, its weights, the outputs delivered to it.

    `state` and `scalars` are those of a training program: the tensors kept from step to step, and the scalar inputs of each step.
    `concatenated`: the values that a Concat makes of all microbatches' results; its one operand stands for all of them.
    """

    rank: int
    steps: tuple[Op, ...]
    inputs: tuple[RankTensor, ...]
    weights: tuple[RankTensor, ...]
    outputs: tuple[RankTensor, ...]
    state: tuple[State, ...] = ()
    scalars: tuple[Value, ...] = ()
    concatenated: frozenset[Value] = frozenset()

    @property
    def bodies(self) -> list[Body]:
        """The bodies of the tasks that it calls, in order of their first calls."""
        return list(dict.fromkeys(step.body for step in self.steps if isinstance(step, Call)))

    @property
    def live_in(self) -> tuple[Value, ...]:
        """The values before its first op: inputs, weights, state, and the scalars of the step."""
        held = [one.value for one in (*self.inputs, *self.weights)]
        return tuple(dict.fromkeys([*held, *[one.value for one in self.state], *self.scalars]))

    @property
    def live_out(self) -> tuple[Value, ...]:
        """The values that are read after its last op: outputs, and the next values of the state."""
        following = [one.next for one in self.state if one.next is not None]
        return (*[one.value for one in self.outputs], *following)

    @property
    def share_key(self) -> Hashable:
        """A key that is equal for ranks with equal files: their programs share the same objects."""
        ends = tuple([tuple([(held.value, held.version) for held in some]) for some in (self.inputs, self.outputs)])
        return id(self.steps), id(self.weights), id(self.state), self.scalars, self.concatenated, ends


def constants_of(steps: Sequence[Op], more: Collection[Value] = ()) -> list[Value]:
    """Returns the constants that ops read, or that are in `more`, in the order of their first readers."""
    read = dict.fromkeys([one for step in steps for one in step.reads])
    return [one for one in {**read, **dict.fromkeys(more)} if one.constant is not None]


AnyOp = TypeVar("AnyOp", bound=Op)


def needed(steps: Sequence[AnyOp], results: Collection[Value], appended: Collection[Value] = ()) -> list[AnyOp]:
    """Returns the ops whose values are read, directly or not; `results` are read after the last op, and readers of `appended` change these.

    Communication involves other ranks, and a task may communicate: both always stay.
    """
    read, needed_ops = {*results}, list[AnyOp]()
    for step in reversed(steps):
        stays = isinstance(step, Comm | Call) or any(value in appended for value in step.reads)
        if stays or not read.isdisjoint(step.makes):
            read.update(step.reads)
            needed_ops.append(step)
    return needed_ops[::-1]


class ValueMap(dict[ir.Value, Value]):
    """Maps each input and output value of nodes to its value in the job."""

    def of(self, value: Value, kind: ir.TypeProtocol | None = None, shape: ir.Shape | None = None) -> ir.Value:
        """Returns a new value that represents `value` of the job and has its name."""
        found = ir.Value(name=str(value), type=kind, shape=shape)
        self[found] = value
        return found

    def ops(self, nodes: Iterable[ir.Node]) -> list[Compute]:
        """Returns the nodes over the values of the job; a node named like its output is labelled with that output's value in the job."""
        computes = []
        for node in nodes:
            inputs = tuple([None if one is None else self[one] for one in node.inputs])
            outputs = tuple([self[one] if one.name else None for one in node.outputs])
            label = next((self[one] for one in node.outputs if one.name and one.name == node.name), node.name or "")
            computes.append(Compute(node, node, inputs, outputs, label=label))
        return computes
