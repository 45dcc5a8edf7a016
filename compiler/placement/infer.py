"""Infers the groups of nodes that no rule places, so that no transfer is added where none is needed.

A value costs one transfer per group other than its own that reads it. Model inputs and weights cost none: ranks read them
themselves. A rank is a group of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.ir.program import Annotated
from partc.compiler.ir.sharded import Group
from partc.compiler.placement.node_stages import stages_of
from partc.compiler.plan.groups import ranks_text
from partc.runtime.artifact import format as fmt

Delivered = dict[ir.Value, tuple[int, ...] | None]
"""Maps each output of the model to the ranks that receive it; None: it stays on its ranks."""
REPEATED = fmt.MADE_OF_INPUTS
"""Why a floating node runs where it is read although what it reads may be sent there."""
_LARGEST_MOVE = 32


@dataclass
class Inferred:
    """Maps each node to its groups, the one that sends its values first, and the reason; `needs`: maps each value to the groups that read
    it.
    """

    groups: dict[ir.Node, tuple[Group, ...]] = field(default_factory=dict)
    reasons: dict[ir.Node, str] = field(default_factory=dict)
    needs: dict[ir.Value, set[Group]] = field(default_factory=dict)
    stages: dict[ir.Node, int] = field(default_factory=dict)
    """The stage of every node on one group, where the plan has stages."""


def infer_placement(
    program: Annotated,
    fixed: dict[ir.Node, Group],
    floating: dict[ir.Node, str],
    delivered: Delivered,
    default: Group,
    staged: Mapping[ir.Node, int] | None = None,
) -> Inferred:
    """The groups of all nodes, given the `fixed` ones; `floating` nodes run wherever they are read.

    `default` is the group of what nothing else decides. `staged`: the nodes that the plan names in stages, where it has stages.
    """
    work = _Settler(program, fixed, floating, delivered, default)
    if staged is not None:
        work.join_stages(staged)
    else:
        work.join_producers()
        work.join_consumers()
        work.move_to_consumers()
    return work.inferred()


class _Settler:
    def __init__(
        self,
        program: Annotated,
        fixed: dict[ir.Node, Group],
        floating: dict[ir.Node, str],
        delivered: Delivered,
        default: Group,
    ) -> None:
        self.program, self.fixed, self.floating, self.default = program, fixed, floating, default
        self.delivered = {value: [(rank,) for rank in ranks or ()] for value, ranks in delivered.items()}
        self.nodes = list(program.model.graph)
        self.index = {node: k for k, node in enumerate(self.nodes)}
        self.group_of: dict[ir.Node, Group] = dict(fixed)
        self.reasons: dict[ir.Node, str] = {}
        self.stages: dict[ir.Node, int] = {}
        self.readers: dict[ir.Value, list[ir.Node]] = {}
        for node in self.nodes:
            for value in program.reads[node]:
                self.readers.setdefault(value, []).append(node)

    def works(self, group: Group) -> bool:
        """Whether nodes that nothing places may run on a group: not on one of parameter servers only."""
        return not self.serving.issuperset(group)

    @cached_property
    def serving(self) -> frozenset[int]:
        return frozenset(range(self.program.plan.ranks)) - {*self.program.plan.workers}

    @cached_property
    def free(self) -> list[ir.Node]:
        return [node for node in self.nodes if node not in self.fixed and node not in self.floating]

    def producers(self, node: ir.Node) -> list[tuple[ir.Value, ir.Node]]:
        """The values that a node reads from nodes that run on one group, with these nodes."""
        found = []
        for value in self.program.reads[node]:
            producer = value.producer()
            if producer is not None and producer not in self.floating:
                found.append((value, producer))
        return found

    def join_producers(self) -> None:
        sizes = _Sizes(self.program)
        for node in self.free:
            weight: dict[Group, int] = {}
            first: dict[Group, ir.Node] = {}
            for value, producer in self.producers(node):
                if producer in self.group_of and self.works(group := self.group_of[producer]):
                    weight[group] = weight.get(group, 0) + sizes.bytes_of(value)
                    first.setdefault(group, producer)
            if weight:
                group = max(weight, key=lambda group: weight[group])
                self.group_of[node] = group
                self.reasons[node] = f"follows {self.program.paths[first[group]]}"

    def join_stages(self, named: Mapping[ir.Node, int]) -> None:
        pipeline = self.program.plan.pipeline
        assert pipeline is not None
        self.stages = stages_of(self.program, named, self.floating)
        for node in self.free:
            stage = self.stages[node]
            self.group_of[node], self.reasons[node] = pipeline.stages[stage].ranks, f"in stage {stage}"

    def join_consumers(self) -> None:
        for node in reversed(self.free):
            if node in self.group_of:
                continue
            if readers := self._readers_with_home(node):
                reader = min(readers, key=lambda reader: self.index[reader])
                self.group_of[node] = self.group_of[reader]
                self.reasons[node] = f"follows its reader {self.program.paths[reader]}"
                continue
            if (mean := self.program.means.get(node)) in self.group_of:
                self.group_of[node], self.reasons[node] = self.group_of[mean], f"follows {self.program.paths[mean]}"
                continue
            wanted = [groups[0] for out in node.outputs if (groups := self.delivered.get(out))]
            follows = wanted and len(self.default) == 1
            self.group_of[node] = wanted[0] if follows else self.default
            self.reasons[node] = "follows its output" if follows else "nothing decides"

    def _readers_with_home(self, node: ir.Node) -> list[ir.Node]:
        """The readers of a node that run on one group; for a reader that runs wherever it is read, its own readers."""
        seen, around = set[ir.Node](), [node]
        while around:
            readers = {reader: None for each in around for out in each.outputs for reader in self.readers.get(out, ())}
            if placed := [reader for reader in readers if reader in self.group_of]:
                return placed
            around = [reader for reader in readers if reader in self.floating and reader not in seen]
            seen.update(around)
        return []

    def needed_on(
        self, value: ir.Value, moved: frozenset[ir.Node] = frozenset(), to: Group | None = None
    ) -> set[Group]:
        groups = {
            to if to is not None and reader in moved else self.group_of[reader]
            for reader in self.readers.get(value, ())
            if reader in self.group_of
        }
        groups.update(self.delivered.get(value, ()))
        return groups

    def _cost(self, values: dict[ir.Value, ir.Node], moved: frozenset[ir.Node], to: Group) -> int:
        total = 0
        for value, producer in values.items():
            home = to if producer in moved else self.group_of[producer]
            total += len(self.needed_on(value, moved, to) - {home})
        return total

    def _gain(self, moved: frozenset[ir.Node], to: Group) -> int:
        values: dict[ir.Value, ir.Node] = {}
        for node in moved:
            values.update(self.producers(node))
            values.update((out, node) for out in node.outputs)
        return self._cost(values, frozenset(), to) - self._cost(values, moved, to)

    def move_to_consumers(self) -> None:
        """Moves free nodes to their consumers, with free producers that serve these alone, as long as that saves a transfer.

        Never to fewer ranks: what a group computes together is not left to one of them to save a transfer.
        """
        free = frozenset(self.free)
        again = bool(free)
        while again:
            again = False
            for node in reversed(self.free):
                here = self.group_of[node]
                away = {group for out in node.outputs for group in self.needed_on(out)} - {here}
                for to in sorted(group for group in away if len(group) >= len(here) and self.works(group)):
                    moved = self._worth_moving(node, here, to, free)
                    if moved:
                        for each in moved:
                            self.group_of[each], self.reasons[each] = to, f"follows its readers on {ranks_text(to)}"
                        again = True
                        break

    def _worth_moving(
        self, node: ir.Node, here: Group, to: Group, free: frozenset[ir.Node]
    ) -> frozenset[ir.Node] | None:
        moved = frozenset({node})
        while (gain := self._gain(moved, to)) >= 0:
            if gain > 0:
                return moved
            more = [
                producer
                for each in moved
                for _, producer in self.producers(each)
                if producer in free and producer not in moved and self.group_of[producer] == here
            ]
            serving = [p for p in more if all(self.needed_on(out, moved, to) <= {to} for out in p.outputs)]
            if not serving or len(moved) >= _LARGEST_MOVE:
                return None
            moved |= {max(serving, key=lambda producer: self.index[producer])}
        return None

    def inferred(self) -> Inferred:
        result = Inferred(reasons=self.reasons, stages=self.stages)
        needs = result.needs
        for value in [*self.readers, *self.delivered]:
            needs[value] = self.needed_on(value)
        for node in reversed(self.nodes):
            if node in self.group_of:
                result.groups[node] = (self.group_of[node],)
                continue
            wanted = {group for out in node.outputs for group in needs.get(out, ())}
            if not wanted and any(out in self.delivered for out in node.outputs):
                followed = self.program.followed.get(node)
                wanted = {followed.group if followed and followed.group else self.default}
            groups = self._where_readable(node, wanted, needs)
            result.groups[node] = groups
            for value in self.program.reads[node]:
                needs.setdefault(value, set()).update(groups)
        return result

    def _where_readable(
        self, node: ir.Node, wanted: set[Group], needs: dict[ir.Value, set[Group]]
    ) -> tuple[Group, ...]:
        """The groups that compute this replicated node: all that want it.

        For `Shape(x)` only groups that hold x; x's own group first if others must be sent the result.
        """
        if self.floating[node] == REPEATED:
            return tuple(sorted(wanted))
        for _, producer in self.producers(node):
            home = self.group_of[producer]
            holding = {home, *(group for value in self.program.reads[node] for group in needs.get(value, ()))}
            if wanted - holding or home in wanted:
                return (home, *sorted((wanted & holding) - {home}))
        return tuple(sorted(wanted))


class _Sizes:
    """Bytes of values at the smallest legal size of every symbol: only used to compare."""

    def __init__(self, program: Annotated) -> None:
        self.values = program.values
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.smallest: dict[str, int] = {}

    def bytes_of(self, value: ir.Value) -> int:
        info = self.values[value]
        size = info.item_bytes or 1
        for dim in info.shape or ():
            if isinstance(dim, str) and dim not in self.smallest:
                self.smallest[dim] = max(1, facts_of(dim, self.known).min or 0)
            size *= self.smallest[dim] if isinstance(dim, str) else dim
        return size
