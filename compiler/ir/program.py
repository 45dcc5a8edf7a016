"""The program that passes take and give: the model, the plan, and what each pass found out.

    load -> Program -> shapes -> place -> shard -> localize -> lower -> Program

A pass gives a new program with its own fields filled, and changes nothing of the one that it is given; only those before `shapes` edit the
model. Decisions are bound to the graph's objects, not to names.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.ir.graph import bodies

if TYPE_CHECKING:
    from partc.compiler.annotations.check import Followed
    from partc.compiler.dims.facts import Facts
    from partc.compiler.frontend.declare import Declared
    from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
    from partc.compiler.layout.layout import Layout
    from partc.compiler.plan.rules import Plan
    from partc.compiler.sharding.propagate import Pinned
    from partc.compiler.tasks.local_view import LocalView
    from partc.compiler.training.config import Training

Dim = int | str
Shape = tuple[Dim, ...]
Array = npt.NDArray[Any]
Reads = dict[ir.Node, tuple[ir.Value, ...]]
Group = tuple[int, ...]
"""Ranks in order that share values; a group of one is a rank."""


@dataclass(frozen=True)
class SymbolInfo:
    """A dynamic dim of the inputs: what is promised of it, and where (`plan.yaml:3`, or the input that names it).

    `parts`: of how many equal parts the facts speak of one; `whole` are then those of all of them.
    """

    facts: Facts
    where: str
    unique: bool = False
    parts: int = 1
    whole: Facts | None = None


@dataclass(frozen=True)
class ValueInfo:
    """What is known of a value: its type as onnxruntime writes it, and its global shape; None where only a run tells."""

    type: str
    shape: Shape | None
    item_bytes: int | None

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("tensor(")


@dataclass(frozen=True)
class Placed:
    """Where a node runs, and the rule that decided: `plan.yaml:8 'conv1'`; `follows`: wherever it is read, as constants do."""

    groups: tuple[Group, ...]
    rule: str
    follows: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that run the node."""
        return _members(self.groups)


@functools.lru_cache(maxsize=1024)
def _members(groups: tuple[Group, ...]) -> Group:
    return tuple(dict.fromkeys(rank for group in groups for rank in group))


@dataclass(frozen=True)
class ShardedValue:
    """A value as it lies on a group: whole, cut, or to be reduced."""

    value: ir.Value
    group: Group
    layout: Layout

    def __hash__(self) -> int:
        """Of the first rank and the number only: a group may have hundreds, and one that is looked up is nearly always the same object."""
        return hash((self.value, self.group[0], len(self.group), self.layout.cuts))

    @property
    def holders(self) -> tuple[tuple[int, Group], ...]:
        """Of each shard the place of the first rank that holds it, and all ranks that do."""
        return _holders(self.group, self.layout)


@functools.lru_cache(maxsize=1024)
def _holders(group: Group, layout: Layout) -> tuple[tuple[int, Group], ...]:
    """Once for all values that lie alike: there may be thousands of ranks."""
    return tuple((held[0], tuple(group[index] for index in held)) for held in layout.holders.values())


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
    """

    node: ir.Node
    source: ir.Node
    captured: Mapping[str, str] = field(default_factory=dict)
    task: TaskKind = TaskKind.FORWARD


@dataclass(frozen=True, eq=False)
class CommOp:
    """In a rank's program: a message or a collective, by the op's name in the artifact; `tag` tells events apart.

    `bytes` is what the rank sends (Send) or receives, an expression in the symbols.
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


RankOp = ComputeOp | CommOp


def read_names(step: RankOp) -> list[str]:
    """The names that an op reads, those captured by bodies included."""
    if isinstance(step, CommOp):
        return list(step.inputs)
    names = [value.name or "" for value in step.node.inputs if value is not None]
    for body in bodies(step.node):
        names += [step.captured.get(value.name or "", value.name or "") for value in captured(body)]
    return names


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
    copy: ShardedValue
    index: int


@dataclass(frozen=True)
class StateTensor:
    """A tensor that ranks keep from step to step, and the value that takes its place after one, "" where nothing does.

    Each rank of `copy` has its shard of it, under `name`. `tensor` is its global name; `parameter`: of whom an optimizer's tensor is.
    """

    name: str
    copy: ShardedValue
    next: str
    tensor: str
    kind: Literal["parameter", "optimizer", "statistics", "gradient"]
    parameter: str = ""
    initial: float = 0.0


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
    `kept` and `scalars` are a training program's: what lives from step to step, and the numbers that each step is given.
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

    @property
    def likeness(self) -> Hashable:
        """Equal for parts of one program whose files are the same: what ranks have in common is one object in their parts."""
        names = tuple(tuple(held.name for held in some) for some in (self.inputs, self.outputs))
        return id(self.steps), id(self.weights), id(self.types), names


@dataclass(frozen=True)
class PackedBox:
    """Where a weight lies in a packed one: the name and shape of that, and per dim begin and end."""

    tensor: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    def within(self, dim: int, begin: int, size: int) -> PackedBox:
        """A part of the part."""
        start = self.box[dim][0] + begin
        return replace(self, box=(*self.box[:dim], (start, start + size), *self.box[dim + 1 :]))


_OF_THE_MODEL = ("parameter", "statistics")
PART = "partc.part_of"
"""Key of `ir.Value.meta`: the `PackedBox` of a weight that is part of a packed one."""


@dataclass(frozen=True)
class Program:
    """A model on its way to ranks; `name` is its file's, `paths` gives every node of the main graph its dotted path.

    `whole` has the names of the model's nodes where the program is a part of it: what training needs. `begun` is the program of the
    training step, of which this one is a part or the evaluation.
    """

    name: str
    model: ir.Model
    plan: Plan
    declared: Declared
    paths: Mapping[ir.Node, str]
    symbols: Mapping[str, SymbolInfo] = field(default_factory=dict)
    values: Mapping[ir.Value, ValueInfo] = field(default_factory=dict)
    followed: Mapping[ir.Node, Followed] = field(default_factory=dict)
    placement: Mapping[ir.Node, Placed] = field(default_factory=dict)
    choices: Mapping[NodeOnGroup, NodeSharding] = field(default_factory=dict)
    given: Pinned | None = None
    training: Training | None = None
    local: LocalView | None = None
    """From `localize` until `lower`: what every rank does, task by task."""
    events: tuple[Event, ...] = ()
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    parts: tuple[RankProgram, ...] = ()
    names: Mapping[ShardedValue, str] = field(default_factory=dict)
    """What every copy of a value is called on the ranks of its group, for those who look inside."""
    warnings: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    begun: Program | None = None

    @cached_property
    def derived_paths(self) -> frozenset[str]:
        """What stands as the reason of a cut that a neighbour asked for: the neighbours' paths."""
        return frozenset(self.paths.values())

    @cached_property
    def alike(self) -> tuple[tuple[RankProgram, tuple[int, ...]], ...]:
        """Every distinct rank program once, as its lowest rank's, with all ranks that have it."""
        found: dict[Hashable, tuple[RankProgram, list[int]]] = {}
        for part in self.parts:
            found.setdefault(part.likeness, (part, []))[1].append(part.rank)
        return tuple((part, tuple(ranks)) for part, ranks in found.values())

    @cached_property
    def around(self) -> dict[ir.Node, tuple[ir.Value, ...]]:
        """Per node of the main graph, the distinct values that its bodies read from outside; they may be its operands, too."""
        return {
            node: tuple(dict.fromkeys(value for body in bodies(node) for value in captured(body)))
            for node in self.model.graph
        }

    @cached_property
    def lying(self) -> dict[str, dict[tuple[Group, Layout], str]]:
        """Per input and parameter the groups and layouts in which ranks get it, each with its name there."""
        found: dict[str, dict[tuple[Group, Layout], str]] = {}
        there: dict[ShardedValue, str] = {held.copy: held.name for part in self.parts for held in part.inputs}
        kept = (one for part, _ in self.alike for one in part.kept if one.kind in _OF_THE_MODEL)
        there |= {one.copy: one.name for one in kept}
        for copy, name in there.items():
            found.setdefault(copy.value.name or "", {})[copy.group, copy.layout] = name
        return found

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of all values of the model, those in bodies included."""
        return frozenset(_names_in(self.model.graph))

    @cached_property
    def reads(self) -> Reads:
        """Per node of the main graph, the distinct values that it reads, those captured by its bodies included."""
        return reads_of(self.model.graph)


def reads_of(graph: ir.Graph) -> Reads:
    """Per node of a graph, in order, the distinct values that it reads, those captured by its bodies included."""
    return {node: tuple(dict.fromkeys(_read_by(node))) for node in graph}


def _names_in(graph: ir.Graph) -> Iterator[str]:
    for value in (*graph.inputs, *graph.initializers.values()):
        yield value.name or ""
    for node in graph:
        yield from (value.name or "" for value in node.outputs)
        for body in bodies(node):
            yield from _names_in(body)


def _read_by(node: ir.Node) -> list[ir.Value]:
    values = [value for value in node.inputs if value is not None]
    for body in bodies(node):
        values += captured(body)
    return values


def captured(body: ir.Graph) -> list[ir.Value]:
    """Values that a body reads from outside of itself, in order of their first use."""
    inside: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    outside: list[ir.Value] = []
    for node in body:
        outside += [value for value in _read_by(node) if value not in inside]
        inside.update(node.outputs)
    return outside + [value for value in body.outputs if value not in inside]
