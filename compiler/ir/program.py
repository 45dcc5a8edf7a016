"""The program that passes take and give: the model, the plan, and what each pass found out.

    load -> Program -> shapes -> place -> shard -> localize -> lower -> Program

A pass gives a new program with its own fields filled, and changes nothing of the one that it is given; only the rewrites, up to `unpack`,
edit its model. Decisions are bound to the graph's objects, not to names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import onnx_ir as ir
from partc.compiler.ir.graph import Reads, bodies, captured_by, reads_of
from partc.compiler.ir.sharded import Group, Placed, ShardedValue
from partc.compiler.ir.training import ProgramKind, Training
from partc.compiler.ir.value_info import SymbolInfo, ValueInfo

if TYPE_CHECKING:
    from partc.compiler.annotations.followed import Followed
    from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
    from partc.compiler.ir.declared import Declared
    from partc.compiler.ir.microbatched import Microbatched
    from partc.compiler.ir.rank_program import Event, RankProgram
    from partc.compiler.layout.layout import Layout
    from partc.compiler.plan.rules import Plan
    from partc.compiler.schedule.costs import Costs
    from partc.compiler.schedule.schedule import Schedule
    from partc.compiler.tasks.local_view import LocalView

_OF_THE_MODEL = ("parameter", "statistics")


@dataclass(frozen=True)
class Program:
    """A model on its way to ranks; `name` is its file's, `paths` gives every node of the main graph its dotted path.

    `file_names`: by path the name in its file of each node that the model was given with, before any fell away or became several.
    Of a plan that trains: `kind` is what the program does of it, `trainable` names the weights of the model that may be learned; `begun` is
    the program of the step, where this is another one.
    `strict`: whether changes of layout that nobody asked for are refused.
    """

    name: str
    model: ir.Model
    plan: Plan
    declared: Declared
    paths: Mapping[ir.Node, str]
    file_names: Mapping[str, str] = field(default_factory=dict)
    kind: ProgramKind = ProgramKind.STEP
    trainable: tuple[str, ...] = ()
    strict: bool = False
    symbols: Mapping[str, SymbolInfo] = field(default_factory=dict)
    values: Mapping[ir.Value, ValueInfo] = field(default_factory=dict)
    followed: Mapping[ir.Node, Followed] = field(default_factory=dict)
    placement: Mapping[ir.Node, Placed] = field(default_factory=dict)
    stages: Mapping[ir.Node, int] = field(default_factory=dict)
    """The stage of every node that is on one group, where the plan names stages."""
    targets: Mapping[ir.Node, str] = field(default_factory=dict)
    """The kind of device that runs a node within its rank; of constants and shapes none, and of nothing where the plan names no target."""
    update_targets: Mapping[ir.Value, str] = field(default_factory=dict)
    """By parameter the kind of device that updates it, and keeps it."""
    has_copies: bool = False
    """Whether ranks' programs have their targets, and the copies between them."""
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
    begun: Program | None = None
    totals: Program | None = None
    """Of a step in microbatches the program that makes what they are given of the whole batch, where there is such."""
    microbatched: Microbatched | None = None
    """What a microbatch is, of a program that runs by microbatches without training."""
    schedule: Schedule | None = None
    """The order of its tasks."""
    costs: Costs | None = None
    """What the tasks of the schedule take and keep."""

    @cached_property
    def derived_paths(self) -> frozenset[str]:
        """The paths of all nodes: the reason of a derived sharding is one of these, that of a given one is a line."""
        return frozenset(self.paths.values())

    @cached_property
    def alike(self) -> tuple[tuple[RankProgram, tuple[int, ...]], ...]:
        """Every distinct rank program once, as its lowest rank has it, with all ranks that share it."""
        found: dict[Hashable, tuple[RankProgram, list[int]]] = {}
        for part in self.parts:
            found.setdefault(part.likeness, (part, []))[1].append(part.rank)
        return tuple((part, tuple(ranks)) for part, ranks in found.values())

    @cached_property
    def means(self) -> dict[ir.Node, ir.Node]:
        """By node that makes the divisor of a mean, for those who add means up, the node that makes the mean: they stand together."""
        divisors = self.training.denominators if self.training is not None else {}
        made = {value.name: value.producer() for value in self.model.graph.outputs}
        pairs = ((made.get(divisor), made.get(mean)) for mean, divisor in divisors.items())
        return {divisor: mean for divisor, mean in pairs if divisor is not None and mean is not None}

    @cached_property
    def around(self) -> dict[ir.Node, tuple[ir.Value, ...]]:
        """Per node of the main graph, the distinct values that its bodies read from outside; they may be its operands, too."""
        return {node: tuple(dict.fromkeys(captured_by(node))) for node in self.model.graph}

    @cached_property
    def lying(self) -> dict[str, dict[tuple[Group, Layout], str]]:
        """Per input and parameter the groups and layouts in which ranks get it, each with its name there."""
        found: dict[str, dict[tuple[Group, Layout], str]] = {}
        there: dict[ShardedValue, str] = {held.version: held.name for part in self.parts for held in part.inputs}
        kept = (one for part, _ in self.alike for one in part.kept if one.kind in _OF_THE_MODEL)
        there |= {one.version: one.name for one in kept}
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


def _names_in(graph: ir.Graph) -> Iterator[str]:
    for value in (*graph.inputs, *graph.initializers.values()):
        yield value.name or ""
    for node in graph:
        yield from (value.name or "" for value in node.outputs)
        for body in bodies(node):
            yield from _names_in(body)
