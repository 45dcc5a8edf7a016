"""Updates of many parameters as one: nodes of one function whose operands lie side by side run as one over all of them.

A rank file has one node of `partc.optimizer` a parameter. The functions are element-wise, so it makes no difference whether they run on
one tensor or on many that follow each other in memory. Memory is laid out so that they do: gradients in the order of their
updates, which for a bucket is the order in which it is reduced, and parameters and the optimizer's tensors like them.

    Momentum(a, a.grad, a.momentum), Momentum(b, b.grad, b.momentum)     ->     Momentum([a b], [a.grad b.grad], [a.momentum b.momentum])

With ZeRO a rank updates a shard that it cuts out of a parameter in each step. Shards that are updated as one lie side by side, and
their new values take their places. The updates of one step of the program are in any order, so those alike come together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from partc.runtime.artifact.graph.optimizer_function import NEXT
from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.training.scalars import SCALARS

from ..artifact import format as fmt
from ..program.flat_buffers import FlatBuffer, fixed_shape
from ..program.rank_file import RankFile
from ..program.steps import Update

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto

Shape: TypeAlias = tuple[int, ...]
NUMBERS = frozenset((*SCALARS, "ratio"))
"""The functions' inputs that are one number."""


@dataclass(frozen=True)
class FusedUpdate:
    """Nodes that run as one. `operands` and `results`: for each of the function's, the names of all members, in order; of a number
    that all share, the one name.
    """

    node: NodeProto
    function: FunctionProto
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    shared: tuple[bool, ...]
    """By operand whether it is one number."""
    elements: int
    target: str = ""


@dataclass(frozen=True)
class RowUpdate:
    """A node that updates the looked-up rows of a table and its slots; it runs by itself, on memory of their own."""

    node: NodeProto
    function: FunctionProto
    target: str = ""


@dataclass
class UpdatePlan:
    """All groups by the place of their step, the memory of gradients and of the tensors that are kept."""

    groups: dict[int, list[FusedUpdate | RowUpdate]] = field(default_factory=dict)
    gradients: list[FlatBuffer] = field(default_factory=list)
    kept: list[FlatBuffer] = field(default_factory=list)
    shards: list[FlatBuffer] = field(default_factory=list)
    """The memory of shards that are cut out of parameters in each step, and of their new values."""
    renewed: dict[str, str] = field(default_factory=dict)
    """By shard that is cut out of a parameter in each step its new value."""
    in_place: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """By step the places of such shards, each with that of the new values, which may be the same."""


def plan_updates(
    file: RankFile,
    shapes: Mapping[str, fmt.Shape],
    types: Mapping[str, str],
    coalesced: Sequence[FlatBuffer],
    targets: Mapping[str, str],
) -> UpdatePlan:
    """How the updates of a rank run, and the memory that they want; gradients that are `coalesced` lie in a buffer already.

    `targets`: of values that do not lie on the host.
    """
    kept = {record.value: record.local_shape(file.rank) for record in file.state}
    nexts = {record.next: kept[record.value] for record in file.state if record.next}
    inputs = {value.name for value in file.model.graph.input} - kept.keys()
    known = {name: fixed for name, shape in shapes.items() if (fixed := fixed_shape(shape)) is not None}
    return plan_groups(
        file.steps,
        {function.name: function for function in file.model.functions},
        {**{name: shape for name, shape in known.items() if name not in inputs}, **kept, **nexts},
        {**types, **{record.value: record.type for record in file.state}},
        kept.keys(),
        {name: (buffer.name, place) for buffer in coalesced for place, name in enumerate(buffer.members)},
        targets,
    )


def plan_groups(
    steps: Sequence[object],
    functions: Mapping[str, FunctionProto],
    shapes: Mapping[str, Shape],
    types: Mapping[str, str],
    kept: Collection[str],
    buffered: Mapping[str, tuple[str, int]],
    targets: Mapping[str, str] = MappingProxyType({}),
) -> UpdatePlan:
    """Groups the updates among `steps`.

    `shapes` and `types` are those of tensors that an update reads. `buffered`: by value the flat buffer in which it lies already, and its
    place there.
    """
    plan = UpdatePlan()
    reads = Counter(name for step in steps if isinstance(step, Update) for node in step.nodes for name in {*node.input})
    again = {name for name, count in reads.items() if count > 1}
    laid: set[str] = set()
    loose: dict[str, list[str]] = {}
    for index, step in enumerate(steps):
        if not isinstance(step, Update):
            continue
        nodes = [(node, functions[node.op_type]) for node in step.nodes]
        by_rows = [RowUpdate(node, function, step.target) for node, function in nodes if is_rowwise(function)]
        dense = [(node, function) for node, function in nodes if not is_rowwise(function)]
        found = [_Member(node, function, types, kept, targets, again) for node, function in dense]
        runs = list(_runs(_alike_together(found), buffered))
        plan.groups[index] = [*(_group(run, shapes, step.target) for run in runs), *by_rows]
        for run in runs:
            for operand in [tuple(names) for names in zip(*(one.tensors for one in run), strict=True)]:
                if operand[0] in kept and not laid.intersection(operand):
                    laid.update(operand)
                    plan.kept.append(_buffer(f"{operand[0]} and on", operand, shapes, types))
            for pairs in zip(*(one.shards for one in run), strict=True):
                if not again.isdisjoint(name for name, _ in pairs):
                    continue
                plan.renewed.update(pairs)
                places = pairs[0]
                if len(run) > 1:
                    both = [_buffer(f"{some[0]} and on", some, shapes, types) for some in zip(*pairs, strict=True)]
                    plan.shards += both
                    places = both[0].name, both[1].name
                plan.in_place.setdefault(index, []).append(places)
            gradients = [one.gradient for one in run]
            if all(name and name not in buffered for name in gradients):
                key = f"{types[gradients[0]]} {index} {targets.get(gradients[0], '')}".rstrip()
                loose.setdefault(key, []).extend(dict.fromkeys(gradients))
    for key, names in loose.items():
        plan.gradients.append(_buffer(f"gradients of {names[0]} {key}", tuple(names), shapes, types))
    return plan


@dataclass(frozen=True)
class _Member:
    """One update node, its operands divided into tensors and numbers."""

    node: NodeProto
    function: FunctionProto
    types: Mapping[str, str]
    kept: Collection[str]
    targets: Mapping[str, str]
    again: Set[str]
    """Values that several updates read: each would lie with the gradients of its own."""

    @property
    def shared(self) -> tuple[bool, ...]:
        """By operand whether it is one number."""
        return tuple(formal in NUMBERS for formal in self.function.input)

    @property
    def tensors(self) -> list[str]:
        return [name for name, one in zip(self.node.input, self.shared, strict=True) if not one]

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name, one in zip(self.node.input, self.shared, strict=True) if one)

    @property
    def gradient(self) -> str:
        """The one tensor that is neither kept nor replaced, and that no other update reads; else empty."""
        replaced = self._replaced
        others = [name for name in self.tensors if name not in self.kept and name not in replaced]
        own = len(others) == 1 and self.again.isdisjoint((*others, *replaced)) and others[0] not in self.node.output
        return others[0] if own else ""

    @property
    def shards(self) -> list[tuple[str, str]]:
        """The operands that are replaced and not kept, which are cut out of parameters in each step, with their new values."""
        return [(name, made) for name, made in self._replaced.items() if name not in self.kept]

    @property
    def _replaced(self) -> dict[str, str]:
        """By operand whose new value the function makes that value."""
        made = dict(zip(self.function.output, self.node.output, strict=True))
        pairs = zip(self.function.input, self.node.input, strict=True)
        return {name: made[following] for formal, name in pairs if (following := f"{formal}{NEXT}") in made}

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for nodes that do the same to operands that lie alike: a parameter that is kept, or a shard cut out of it in each step."""
        attributes = tuple(sorted(one.SerializeToString(deterministic=True) for one in self.node.attribute))
        kept = tuple(name in self.kept for name in self.tensors)
        kind = self.types[self.tensors[0]]
        return self.node.op_type, attributes, self.numbers, kept, kind, self.targets.get(self.gradient)

    @property
    def is_alone(self) -> bool:
        """Whether it runs by itself: memory is laid out for one gradient, and for what is kept; not for other results."""
        return not self.gradient or not all(formal.endswith(NEXT) for formal in self.function.output)


def _alike_together(members: Sequence[_Member]) -> list[_Member]:
    """The members in groups of one key, in the order of the first of each; in their own order where one reads what another makes."""
    made = {name for one in members for name in one.node.output}
    if any(not made.isdisjoint(one.node.input) for one in members):
        return list(members)
    places: dict[object, int] = {}
    for one in members:
        places.setdefault(one.key, len(places))
    return sorted(members, key=lambda one: places[one.key])


def _runs(members: Sequence[_Member], buffered: Mapping[str, tuple[str, int]]) -> Iterator[list[_Member]]:
    """Neighbours that can run as one."""
    run: list[_Member] = []
    for one in members:
        fits = bool(run) and run[-1].key == one.key and not one.is_alone and not run[-1].is_alone
        if fits and _follows(buffered.get(run[-1].gradient), buffered.get(one.gradient)):
            run.append(one)
            continue
        if run:
            yield run
        run = [one]
    if run:
        yield run


def _follows(before: tuple[str, int] | None, after: tuple[str, int] | None) -> bool:
    """Whether a gradient lies right behind another one; those that lie in no buffer yet will."""
    if before is None or after is None:
        return before is after
    return after == (before[0], before[1] + 1)


def _group(run: Sequence[_Member], shapes: Mapping[str, Shape], target: str) -> FusedUpdate:
    first = run[0]
    shared = first.shared
    operands = tuple(
        (names[0],) if one else tuple(names)
        for one, names in zip(shared, zip(*(member.node.input for member in run), strict=True), strict=True)
    )
    results = tuple(tuple(names) for names in zip(*(member.node.output for member in run), strict=True))
    elements = sum(prod(shapes[member.tensors[0]]) for member in run)
    return FusedUpdate(first.node, first.function, operands, results, shared, elements, target)


def _buffer(name: str, members: tuple[str, ...], shapes: Mapping[str, Shape], types: Mapping[str, str]) -> FlatBuffer:
    return FlatBuffer(name, types[members[0]], members, tuple(prod(shapes[one]) for one in members))
