"""Decides which updates of a rank file run as one: nodes of one function whose operands are next to each other in memory.

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
from functools import cached_property
from types import MappingProxyType

from onnx import FunctionProto, NodeProto
from partc.runtime.artifact.graph.optimizer_function import NEXT
from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.training.scalars import NUMBERS


@dataclass
class UpdatePlan:
    """Maps each step to its groups of nodes, and to the lists of values that are next to each other in memory."""

    groups: dict[int, list[list[NodeProto]]] = field(default_factory=dict)
    gradients: list[tuple[str, ...]] = field(default_factory=list)
    state: list[tuple[str, ...]] = field(default_factory=list)
    shards: list[tuple[str, ...]] = field(default_factory=list)
    """Shards that are cut out of parameters in each step, and their new values."""
    renewed: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Maps each step to such shards, each with the new value that replaces it."""


def plan_groups(
    steps: Sequence[Sequence[NodeProto]],
    functions: Mapping[str, FunctionProto],
    types: Mapping[str, str],
    kept: Collection[str],
    buffered: Mapping[str, tuple[str, int]],
    targets: Mapping[str, str] = MappingProxyType({}),
) -> UpdatePlan:
    """Groups the nodes of each step of updates. `types` are those of what an update reads, `targets` those of values that have one.

    `buffered`: by value that a collective of several puts into a buffer the buffer, and its place among the values there.
    """
    plan = UpdatePlan()
    reads = Counter(name for step in steps for node in step for name in {*node.input})
    again = {name for name, count in reads.items() if count > 1}
    laid: set[str] = set()
    loose: dict[tuple[str, int, str], list[str]] = {}
    for index, step in enumerate(steps):
        nodes = [(node, functions[node.op_type]) for node in step]
        by_rows = [[node] for node, function in nodes if is_rowwise(function)]
        dense = [(node, function) for node, function in nodes if not is_rowwise(function)]
        found = [_Member(node, function, types, kept, targets, again) for node, function in dense]
        runs = list(_runs(_alike_together(found), buffered))
        plan.groups[index] = [*([one.node for one in run] for run in runs), *by_rows]
        for run in runs:
            for operand in [tuple(names) for names in zip(*(one.tensors for one in run), strict=True)]:
                if operand[0] in kept and not laid.intersection(operand):
                    laid.update(operand)
                    plan.state.append(operand)
            for pairs in zip(*(one.shards for one in run), strict=True):
                if not again.isdisjoint(name for name, _ in pairs):
                    continue
                plan.renewed.setdefault(index, []).extend(pairs)
                plan.shards += [tuple(some) for some in zip(*pairs, strict=True)]
            gradients = [one.gradient for one in run]
            if all(name and name not in buffered for name in gradients):
                key = types[gradients[0]], index, targets.get(gradients[0], "")
                loose.setdefault(key, []).extend(dict.fromkeys(gradients))
    plan.gradients += [tuple(names) for names in loose.values()]
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

    @cached_property
    def shared(self) -> tuple[bool, ...]:
        """Whether each operand is one number."""
        return tuple(formal in NUMBERS for formal in self.function.input)

    @cached_property
    def tensors(self) -> list[str]:
        return [name for name, one in zip(self.node.input, self.shared, strict=True) if not one]

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name, one in zip(self.node.input, self.shared, strict=True) if one)

    @cached_property
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

    @cached_property
    def _replaced(self) -> dict[str, str]:
        """Maps each operand whose new value the function makes to that value."""
        made = dict(zip(self.function.output, self.node.output, strict=True))
        pairs = zip(self.function.input, self.node.input, strict=True)
        return {name: made[following] for formal, name in pairs if (following := f"{formal}{NEXT}") in made}

    @cached_property
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
