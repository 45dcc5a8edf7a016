"""A program on its way from a model to ranks: one frozen record for each phase, which has the facts of the phases before it and its own.

    Loaded -> Prepared -> Typed -> Annotated -> Placed -> Sharded -> Targeted -> Localized
                                                                              -> Lowered -> Scheduled -> Complete

A pass takes the program of one phase and gives that of the same or the next one (`into`), so no fact is looked for before it is there; a
function takes the earliest phase whose facts it reads. `Localized` (`lower/local_view.py`) is no part of what follows: `lower` makes
programs of ranks of it.
A pass changes nothing of the program that it is given; only the rewrites, up to `precision`, edit its model. Decisions are bound to the
graph's objects, not to names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import onnx_ir as ir
from partc.compiler.ir.graph import Reads, bodies, captured_by, name_of, operand_name, reads_of
from partc.compiler.ir.sharded import Group, NodePlacement, ShardedValue
from partc.compiler.ir.training import ProgramKind, Training
from partc.compiler.ir.value_info import SymbolInfo, ValueInfo

if TYPE_CHECKING:
    from partc.compiler.annotations.followed import Followed
    from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
    from partc.compiler.ir.declared import Declared
    from partc.compiler.ir.programs import Event, RankProgram, Value
    from partc.compiler.layout.layout import Layout
    from partc.compiler.plan.rules import Plan
    from partc.compiler.schedule.costs import Costs
    from partc.compiler.schedule.schedule import Schedule
    from partc.runtime.artifact.format import StoredRecord
    from partc.runtime.artifact.generation import GenerationRecord

_OF_THE_MODEL = ("parameter", "statistics", "cache", "adapter")
Phase = TypeVar("Phase", bound="Loaded")
PAST_ENTRIES = "_past_entries"
"""The name of how many entries caches have before a step, in sizes that follow from it: at run time alone it is a number."""


@dataclass(frozen=True)
class Generation:
    """A decoder that makes tokens: by cache that ranks keep what takes its place after a step, None where nothing does, and what the
    manifest says of it. `unfused`: the nodes of attention that keep the model's form, since their mask is not causal, or not proven so.
    `sizes`: by value of the model its dims: how many slots or tokens a step has where the model has its batch or its tokens, else None.
    `stacks`: the names of weights of adapters that ranks keep, since others are loaded between steps.
    """

    caches: Mapping[ir.Value, ir.Value | None]
    record: GenerationRecord
    unfused: tuple[str, ...] = ()
    sizes: Mapping[ir.Value, tuple[int | None, ...]] = field(default_factory=dict)
    stacks: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A single-device model with its plan; `name` is its file's, `paths` gives every node of the main graph its dotted path.

    `file_names`: by path the name in its file of each node that the model was given with, before any fell away or became several.
    For a plan that trains, `kind` says which of its programs this is, `trainable` names the trainable weights of the model.
    `strict`: whether changes of layout that were not asked for are refused.
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
    size: int = 0
    """The tokens of a chunk, or the slots of each run, of a narrow program of a plan that generates; 0 of all others."""
    generation: Generation | None = None
    """The facts that `generate` in a plan adds."""
    other_programs: Mapping[ProgramKind, Lowered] = field(default_factory=dict)
    """The plan's other programs that are there by now, over whose tensors this one is."""
    warnings: tuple[str, ...] = ()

    def into(self, phase: type[Phase], **facts: Any) -> Phase:
        """The program of another phase: its facts are those given, and those that this one has."""
        own = {one.name for one in fields(self)}
        kept = {one.name: getattr(self, one.name) for one in fields(phase) if one.name in own}
        return phase(**{**kept, **facts})

    @property
    def caches(self) -> Mapping[ir.Value, ir.Value | None]:
        """Maps each cache that ranks keep to its value after a step; empty where nothing is generated."""
        return {} if self.generation is None else self.generation.caches

    def path_of(self, value: ir.Value) -> str:
        """The path of the node that makes a value; the name of one that no node of the main graph makes."""
        producer = value.producer()
        return name_of(value) if producer is None else self.paths[producer]

    @cached_property
    def derived_paths(self) -> frozenset[str]:
        """The paths of all nodes: the reason of a derived sharding is one of these, that of a given one is a line."""
        return frozenset(self.paths.values())

    @cached_property
    def around(self) -> dict[ir.Node, tuple[ir.Value, ...]]:
        """Per node of the main graph, the distinct values that its bodies read from outside; they may be its operands, too."""
        return {node: tuple(dict.fromkeys(captured_by(node))) for node in self.model.graph}

    @cached_property
    def capturing(self) -> dict[ir.Value, list[ir.Node]]:
        """Per value that bodies read from outside, the nodes of the main graph that have these bodies."""
        found: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self.around.items():
            for value in values:
                found.setdefault(value, []).append(node)
        return found

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of all values of the model, those in bodies included."""
        return frozenset(_names_in(self.model.graph))

    @cached_property
    def reads(self) -> Reads:
        """Per node of the main graph, the distinct values that it reads, those captured by its bodies included."""
        return reads_of(self.model.graph)


@dataclass(frozen=True, kw_only=True)
class Prepared(Loaded):
    """The model has its loss and metrics, where the plan trains; else `training` is None, to the end."""

    training: Training | None

    @cached_property
    def means(self) -> dict[ir.Node, ir.Node]:
        """Maps each node that makes the divisor of a mean to the node that makes the mean, for code that adds means up: the two are
        neighbors.
        """
        divisors = self.training.denominators if self.training is not None else {}
        made = {value.name: value.producer() for value in self.model.graph.outputs}
        pairs = ((made.get(divisor), made.get(mean)) for mean, divisor in divisors.items())
        return {divisor: mean for divisor, mean in pairs if divisor is not None and mean is not None}


@dataclass(frozen=True, kw_only=True)
class Typed(Prepared):
    """Every value has a type and a global shape, every symbol its facts.

    `batch_dims`: the inputs that hold records of a batch, with the dim of these; of a program that streams its outputs, too.
    """

    symbols: Mapping[str, SymbolInfo]
    values: Mapping[ir.Value, ValueInfo]
    batch_dims: Mapping[ir.Value, int]


@dataclass(frozen=True, kw_only=True)
class Annotated(Typed):
    """A typed program with the statements of the model's own annotations, against which its nodes are checked."""

    followed: Mapping[ir.Node, Followed]


@dataclass(frozen=True, kw_only=True)
class Placed(Annotated):
    """Every node has its groups; `stages` has the stage of every node that is on one group, where the plan names stages."""

    placement: Mapping[ir.Node, NodePlacement]
    stages: Mapping[ir.Node, int]


@dataclass(frozen=True, kw_only=True)
class Sharded(Placed):
    """Every node on several ranks has its sharding; `pinned` are the layouts that the plan or the model gives."""

    choices: Mapping[NodeOnGroup, NodeSharding]
    pinned: Pinned


@dataclass(frozen=True, kw_only=True)
class Targeted(Sharded):
    """The kinds of devices within ranks are known; of nothing where the plan names no target.

    `targets`: what runs a node, of constants and shapes none. `update_targets`: by parameter what updates it, and keeps it.
    """

    targets: Mapping[ir.Node, str]
    update_targets: Mapping[ir.Value, str]


@dataclass(frozen=True, kw_only=True)
class Lowered(Targeted):
    """Every rank has its program, in `parts`; all `events` are in the order of all ranks.

    `at`: what every version of a value is on the ranks of its group, for those who look inside.
    """

    events: tuple[Event, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    parts: tuple[RankProgram, ...]
    at: Mapping[ShardedValue, Value]
    stored: StoredRecord | None = None
    """The units of stored parameters, and what ranks have of them at once, once their gathers are placed."""

    @cached_property
    def distinct_programs(self) -> tuple[tuple[RankProgram, tuple[int, ...]], ...]:
        """Every distinct rank program once, as its lowest rank has it, with all ranks that share it."""
        found: dict[Hashable, tuple[RankProgram, list[int]]] = {}
        for part in self.parts:
            found.setdefault(part.share_key, (part, []))[1].append(part.rank)
        return tuple((part, tuple(ranks)) for part, ranks in found.values())

    @cached_property
    def input_locations(self) -> dict[str, dict[tuple[Group, Layout], str]]:
        """Per input and parameter the groups and layouts in which ranks get it, each with its name there."""
        found: dict[str, dict[tuple[Group, Layout], str]] = {}
        there: dict[ShardedValue, str] = {held.version: str(held.value) for part in self.parts for held in part.inputs}
        kept = (one for part, _ in self.distinct_programs for one in part.state if one.kind in _OF_THE_MODEL)
        there |= {one.version: str(one.value) for one in kept}
        for copy, name in there.items():
            found.setdefault(name_of(copy.value), {})[copy.group, copy.layout] = name
        return found


@dataclass(frozen=True)
class TaskOrder:
    """The order of a program's tasks, and what they take and keep."""

    schedule: Schedule
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class Scheduled(Lowered):
    """The programs are those of a whole step; `tasks` is None where it runs no microbatches."""

    tasks: TaskOrder | None

    @property
    def working_groups(self) -> int:
        """The number of groups of ranks that can run tasks at the same time."""
        return 1 if self.tasks is None else len(set(self.tasks.schedule.stages.stage_ranks))


@dataclass(frozen=True, kw_only=True)
class Complete(Scheduled):
    """The programs have the targets of their ops, and the copies between them, where the plan names targets: they can be written."""


def _names_in(graph: ir.Graph) -> Iterator[str]:
    yield from map(name_of, (*graph.inputs, *graph.initializers.values()))
    for node in graph:
        yield from map(operand_name, node.outputs)
        for body in bodies(node):
            yield from _names_in(body)
