"""Programs of ranks: ops in order, with names instead of values; and the events that several ranks take part in.

ComputeOp   %h = Relu(%x)                          a node in local shapes
CommOp      %h = AllReduce(%h.partial) group=0-3   a message or a collective; `tag` is that of its `Event`
CopyOp      %h = Copy(%h.cuda) to=cpu              a value from one of the rank's targets to another
TaskCall    %h.3 = F0(%x.3, %w)                    a task of one microbatch: its body, with the names that the values have there
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.ir.graph import captured_by
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.ir.value_info import Array, Shape
from partc.runtime.artifact.format import Law

if TYPE_CHECKING:
    from partc.compiler.layout.layout import Layout


class TaskKind(StrEnum):
    """The task of a step to which an op belongs, by the letter that a schedule writes: `2F0`."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    """The reduction of the parameters' gradients, and the update: once a step, however many microbatches it has."""


@dataclass(frozen=True, eq=False)
class ComputeOp:
    """In a rank's program: a node with the names that its operands have there; `source` is the model's node that it stands for.

    `captured` renames what bodies read from outside of themselves. An op is its own identity: ranks that do the same have one object.
    `again`: the line of the plan for which a forward op is repeated in the backward task. `target`: the kind of device that runs it, empty
    where that is not decided, or there is one only.
    """

    node: ir.Node
    source: ir.Node
    captured: Mapping[str, str] = field(default_factory=dict)
    task: TaskKind = TaskKind.FORWARD
    again: str = ""
    target: str = ""

    @cached_property
    def captured_names(self) -> tuple[str, ...]:
        """The names that the bodies of the node read from around it."""
        return tuple([self.captured.get(value.name or "", value.name or "") for value in captured_by(self.node)])

    @cached_property
    def read_names(self) -> tuple[str, ...]:
        """The names that the op reads, those captured by bodies included."""
        return (*(value.name or "" for value in self.node.inputs if value is not None), *self.captured_names)


@dataclass(frozen=True, eq=False)
class CommOp:
    """In a rank's program: a message or a collective, by the op's name in the artifact; `tag` tells events apart.

    `bytes` is what the rank sends (Send) or receives, an expression in the symbols. `cell` is the task whose value it moves, as a schedule
    writes it, where it stands between tasks.
    """

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | str | tuple[int, ...]]
    tag: int
    value: ir.Value
    cause: str
    bytes: str
    task: TaskKind = TaskKind.FORWARD
    cell: str = ""


@dataclass(frozen=True, eq=False)
class CopyOp:
    """In a rank's program: the value `source` under the name `made` on another target. `path` is that of what makes the value.

    `bytes` is an expression in the symbols, `unknown` where only a run tells.
    """

    source: str
    made: str
    origin: str
    target: str
    path: str
    cause: str
    bytes: str
    task: TaskKind = TaskKind.FORWARD


@dataclass(frozen=True, eq=False)
class TaskBody:
    """The ops of a task for any of its microbatches; `stage` and `kind` (F, B, W) are those of the schedule.

    `types`: the values' types by their names in the body. In the microbatch k an event of the body has the tag `tag + k`, and a value v
    that stays inside is called `v.k`.
    """

    stage: int
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[ComputeOp | CommOp | CopyOp, ...]
    types: Mapping[str, tuple[ir.Value, Shape | None]]

    @property
    def name(self) -> str:
        """The name of the function in a rank file: `F0`."""
        return f"{self.kind}{self.stage}"


@dataclass(frozen=True, eq=False)
class TaskCall:
    """In a rank's program: a task of one microbatch. `inputs` and `outputs` are the values that those of the body stand for."""

    body: TaskBody
    microbatch: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    task: TaskKind = TaskKind.FORWARD

    @property
    def cell(self) -> str:
        """The task as a schedule writes it: `0F3`."""
        return f"{self.body.stage}{self.body.kind}{self.microbatch}"

    @property
    def names(self) -> dict[str, str]:
        """By name in the body the name in this microbatch."""
        made = (name for step in self.body.steps for name in made_names(step) if name)
        inside = {name: f"{name}.{self.microbatch}" for name in made}
        ends = zip((*self.body.inputs, *self.body.outputs), (*self.inputs, *self.outputs), strict=True)
        return {**inside, **dict(ends)}


RankOp = ComputeOp | CommOp | CopyOp | TaskCall


def read_names(step: RankOp) -> list[str]:
    """The names that an op reads, those captured by bodies included."""
    if isinstance(step, CopyOp):
        return [step.source]
    if isinstance(step, CommOp | TaskCall):
        return list(filter(None, step.inputs))
    return [*step.read_names]


def made_names(step: RankOp) -> list[str]:
    """The names that an op makes."""
    if isinstance(step, CopyOp):
        return [step.made]
    if isinstance(step, CommOp | TaskCall):
        return list(filter(None, step.outputs))
    return [value.name or "" for value in step.node.outputs]


def captured_names(step: ComputeOp) -> list[str]:
    """The names that the bodies of an op's node read from around it."""
    return [*step.captured_names]


def with_names(node: ir.Node, names: Mapping[str, str]) -> ir.Node:
    """A node with other names for some of its operands and outputs; the node itself where it has none of them."""
    if not any(value is not None and value.name in names for value in (*node.inputs, *node.outputs)):
        return node
    return ir.Node(
        node.domain,
        node.op_type,
        inputs=[None if one is None else ir.Value(name=names.get(one.name or "", one.name)) for one in node.inputs],
        attributes=list(node.attributes.values()),
        outputs=[ir.Value(name=names.get(one.name or "", one.name)) for one in node.outputs],
        name=names.get(node.name or "", node.name),
        overload=node.overload,
        version=node.version,
    )


Way = tuple[tuple[Group, "Layout"], tuple[Group, "Layout"]]
"""A group and a layout on it, before and after."""


@dataclass(frozen=True)
class Event:
    """A message or collective as all its ranks see it: `ranks` are source and target of a message, or the sets of a collective.

    `derived`: it changes the layout for a reader whose cut nobody gave.
    """

    tag: int
    op_type: str
    value: ir.Value
    name: str
    ranks: tuple[tuple[int, ...], ...]
    group: str
    shape: Shape | None
    bytes: str
    cause: str
    derived: bool = False
    way: Way | None = None
    """How the value lies before and after a collective."""


@dataclass(frozen=True)
class LocalTensor:
    """A model input, weight or output on a rank: its name there and the layout's shard, by the rank's place in the group."""

    name: str
    version: ShardedValue
    index: int


@dataclass(frozen=True)
class StateTensor:
    """A tensor that ranks keep from step to step, and the value that takes its place after one, "" where nothing does.

    Each rank of `version` has its shard of it, under `name`. `tensor` is its global name; `parameter`: of whom an optimizer's tensor is.
    """

    name: str
    version: ShardedValue
    next: str
    tensor: str
    kind: Literal["parameter", "optimizer", "statistics", "gradient", "scale"]
    parameter: str = ""
    initial: float | Law = 0.0
    target: str = ""
    """The kind of device on which it lies, where ranks have several."""


@dataclass(frozen=True)
class RankConstant:
    """A constant that differs by rank: each item an expression over `place`, the rank's place in its list of `group`."""

    group: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    items: tuple[str, ...]

    @staticmethod
    def of(group: str, items: Sequence[str], dtype: npt.DTypeLike = np.int64) -> RankConstant:
        """A vector of these items."""
        return RankConstant(group, np.dtype(dtype), (len(items),), tuple(items))

    @staticmethod
    def first(group: str, dtype: npt.DTypeLike) -> RankConstant:
        """1 on the first rank of each list, 0 on the others."""
        return RankConstant(group, np.dtype(dtype), (), ("Max(1 - place, 0)",))


Constant: TypeAlias = Array | RankConstant


@dataclass(frozen=True)
class RankProgram:
    """One rank's program: its steps in order, the inputs that it reads, its weights, the outputs delivered to it.

    `constants` belong to no weight of the model, and may differ by rank; `types` has every value by its name there, with local shapes.
    `kept` and `scalars` are a training program's: what lives from step to step, and the numbers that each step is given. `appended` are
    made by a Concat of what each part of a batch gives, of which the operand stands for all parts.
    """

    rank: int
    steps: tuple[RankOp, ...]
    inputs: tuple[LocalTensor, ...]
    weights: tuple[LocalTensor, ...]
    outputs: tuple[LocalTensor, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    types: Mapping[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)
    kept: tuple[StateTensor, ...] = ()
    scalars: tuple[str, ...] = ()
    appended: frozenset[str] = frozenset()

    @property
    def bodies(self) -> list[TaskBody]:
        """The bodies of the tasks that it calls, in order of their first calls."""
        return list(dict.fromkeys(step.body for step in self.steps if isinstance(step, TaskCall)))

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for ranks whose files are the same: what they share is one object in their programs."""
        names = tuple(tuple(held.name for held in some) for some in (self.inputs, self.outputs))
        return id(self.steps), id(self.weights), id(self.types), names


def needed_steps(steps: Sequence[RankOp], given: Collection[str]) -> list[RankOp]:
    """The steps whose results are read, directly or not; `given` is what is read after the last.

    Communication takes part in what other ranks do, and a task may communicate: both always stay.
    """
    read = {*given}
    found: list[RankOp] = []
    for step in reversed(steps):
        if isinstance(step, CommOp | TaskCall) or not read.isdisjoint(made_names(step)):
            read.update(read_names(step))
            found.append(step)
    return found[::-1]
