"""The program between the model and the ranks: a frozen record for each phase, with the facts of earlier phases and its own.

    Loaded -> Prepared -> Typed -> Annotated -> Placed -> Sharded -> Targeted -> Localized
                                                                              -> Lowered -> Scheduled -> Complete

A pass takes the program of one phase and returns that of the same or the next phase (`into`), so no fact is read before it exists; a
function takes the earliest phase whose facts it reads. `Localized` (`lower/job.py`) is not a base of later phases: `lower` makes
rank programs of it. A pass does not change its argument; only the rewrites, up to `precision`, edit its model. Decisions are keyed by the
graph's objects, not by names.
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
from partc.compiler.layout.layout import Layout
from partc.runtime.artifact.format import StoredRecord
from partc.runtime.artifact.generation import GenerationRecord

if TYPE_CHECKING:
    from partc.compiler.annotations.read import Followed
    from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
    from partc.compiler.ir.declared import Declared
    from partc.compiler.ir.programs import Event, RankProgram, Value
    from partc.compiler.plan.rules import Plan
    from partc.compiler.schedule.costs import Costs
    from partc.compiler.schedule.schedule import Schedule

_OF_THE_MODEL = ("parameter", "statistics", "cache", "adapter")
Phase = TypeVar("Phase", bound="Loaded")
PAST_ENTRIES = "_past_entries"
"""The name of the number of cache entries before a step, in sizes that depend on it: it is a number only at run time."""


@dataclass(frozen=True)
class Generation:
    """A decoder that generates tokens: `caches` maps each cache that ranks keep to its value after a step, or to None if it does not
    change; the record is that of the manifest.

    `unfused`: the attention nodes that keep the model's form, since their mask is not causal, or not proven to be. `sizes`: maps values of
    the model to their dims, where the batch or the tokens are replaced by a step's slots or tokens, else None. `stacks`: the names of
    adapter weights that ranks keep as state, since other adapters are loaded between steps.
    """

    caches: Mapping[ir.Value, ir.Value | None]
    record: GenerationRecord
    unfused: tuple[str, ...] = ()
    sizes: Mapping[ir.Value, tuple[int | None, ...]] = field(default_factory=dict)
    stacks: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A single-device model with its plan; `name` is its file's, `paths` maps every node of the main graph to its dotted path.

    `file_names`: maps the path of each node of the original model, before any was removed or split, to its name in the file. For a plan
    that trains, `kind` is the kind of this program, and `trainable` names the trainable weights of the model. `strict`: whether changes of
    layout that the plan does not request are refused.
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
    """The tokens of a chunk, or the slots of each run, of a narrow program of a generating plan; 0 for all others."""
    generation: Generation | None = None
    """The facts that `generate` in a plan adds."""
    other_programs: Mapping[ProgramKind, Lowered] = field(default_factory=dict)
    """The plan's other programs that are already compiled, with which this one shares tensors."""
    warnings: tuple[str, ...] = ()

    def into(self, phase: type[Phase], **facts: Any) -> Phase:
        """Returns the program of another phase: its facts are `facts` and those of this one."""
        own = {one.name for one in fields(self)}
        kept = {one.name: getattr(self, one.name) for one in fields(phase) if one.name in own}
        return phase(**{**kept, **facts})

    @property
    def caches(self) -> Mapping[ir.Value, ir.Value | None]:
        """Maps each cache that ranks keep to its value after a step; empty without generation."""
        return {} if self.generation is None else self.generation.caches

    def path_of(self, value: ir.Value) -> str:
        """Returns the path of the node that makes a value; the value's name if no node of the main graph makes it."""
        producer = value.producer()
        return name_of(value) if producer is None else self.paths[producer]

    @cached_property
    def derived_paths(self) -> frozenset[str]:
        """The paths of all nodes; the reason of a derived sharding is one of these, that of a requested sharding is a line of the plan."""
        return frozenset(self.paths.values())

    @cached_property
    def around(self) -> dict[ir.Node, tuple[ir.Value, ...]]:
        """Maps each node of the main graph to the distinct values that its bodies read from outside; they may also be its operands."""
        return {node: tuple(dict.fromkeys(captured_by(node))) for node in self.model.graph}

    @cached_property
    def capturing(self) -> dict[ir.Value, list[ir.Node]]:
        """Maps each value that bodies read from outside to the nodes of the main graph that have these bodies."""
        found: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self.around.items():
            for value in values:
                found.setdefault(value, []).append(node)
        return found

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of all values of the model, including those in bodies."""
        return frozenset(_names_in(self.model.graph))

    @cached_property
    def reads(self) -> Reads:
        """Maps each node of the main graph to the distinct values that it reads, including those captured by its bodies."""
        return reads_of(self.model.graph)


@dataclass(frozen=True, kw_only=True)
class Prepared(Loaded):
    """A program whose model has its loss and metrics, if the plan trains; otherwise `training` is None in this and all later phases."""

    training: Training | None

    @cached_property
    def means(self) -> dict[ir.Node, ir.Node]:
        """Maps each node that makes a mean's divisor to the node that makes the mean, its neighbor, for code that adds up means."""
        divisors = self.training.denominators if self.training is not None else {}
        made = {value.name: value.producer() for value in self.model.graph.outputs}
        pairs = ((made.get(divisor), made.get(mean)) for mean, divisor in divisors.items())
        return {divisor: mean for divisor, mean in pairs if divisor is not None and mean is not None}


@dataclass(frozen=True, kw_only=True)
class Typed(Prepared):
    """A program in which every value has a type and a global shape, and every symbol its facts.

    `batch_dims`: maps the inputs with records of a batch to the dim of the records; in a program that streams its outputs, these too.
    """

    symbols: Mapping[str, SymbolInfo]
    values: Mapping[ir.Value, ValueInfo]
    batch_dims: Mapping[ir.Value, int]


@dataclass(frozen=True, kw_only=True)
class Annotated(Typed):
    """A typed program with the model's own annotations, against which its nodes are checked."""

    followed: Mapping[ir.Node, Followed]


@dataclass(frozen=True, kw_only=True)
class Placed(Annotated):
    """A program in which every node has its groups; `stages` maps every node on one group to its stage, if the plan names stages."""

    placement: Mapping[ir.Node, NodePlacement]
    stages: Mapping[ir.Node, int]


@dataclass(frozen=True, kw_only=True)
class Sharded(Placed):
    """A program in which every node on several ranks has its sharding; `pinned` has the layouts that the plan or the model sets."""

    choices: Mapping[NodeOnGroup, NodeSharding]
    pinned: Pinned


@dataclass(frozen=True, kw_only=True)
class Targeted(Sharded):
    """A program with the kinds of devices within ranks; both maps are empty if the plan names no target.

    `targets`: maps nodes to the target that runs them, without constants and shapes. `update_targets`: maps parameters to the target that
    updates and stores them.
    """

    targets: Mapping[ir.Node, str]
    update_targets: Mapping[ir.Value, str]


@dataclass(frozen=True, kw_only=True)
class Lowered(Targeted):
    """A program of which every rank has its part, in `parts`; all `events` are in an order that holds on all ranks.

    `at`: maps every version of a value to its value on the ranks of its group, for inspection.
    """

    events: tuple[Event, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    parts: tuple[RankProgram, ...]
    at: Mapping[ShardedValue, Value]
    stored: StoredRecord | None = None
    """The units of stored parameters, and the peak of their gathered bytes on ranks, once their gathers are placed."""
    gathered: Mapping[Value, int] = field(default_factory=dict)
    """The bytes of each gathered value of a stored parameter."""

    @cached_property
    def distinct_programs(self) -> tuple[tuple[RankProgram, tuple[int, ...]], ...]:
        """Every distinct rank program once, that of its lowest rank, with all ranks that share it."""
        found: dict[Hashable, tuple[RankProgram, list[int]]] = {}
        for part in self.parts:
            found.setdefault(part.share_key, (part, []))[1].append(part.rank)
        return tuple((part, tuple(ranks)) for part, ranks in found.values())

    @cached_property
    def input_locations(self) -> dict[str, dict[tuple[Group, Layout], str]]:
        """Maps each input and parameter to the groups and layouts in which ranks get it, each with its name there."""
        locations: dict[str, dict[tuple[Group, Layout], str]] = {}
        there: dict[ShardedValue, str] = {held.version: str(held.value) for part in self.parts for held in part.inputs}
        kept = (one for part, _ in self.distinct_programs for one in part.state if one.kind in _OF_THE_MODEL)
        there |= {one.version: str(one.value) for one in kept}
        for copy, name in there.items():
            locations.setdefault(name_of(copy.value), {})[copy.group, copy.layout] = name
        return locations


@dataclass(frozen=True)
class TaskOrder:
    """The order of a program's tasks, with the tasks' inputs and saved values."""

    schedule: Schedule
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class Scheduled(Lowered):
    """A program of a whole step; `tasks` is None if it has no microbatches."""

    tasks: TaskOrder | None

    @property
    def working_groups(self) -> int:
        """The number of groups of ranks that can run tasks at the same time."""
        return 1 if self.tasks is None else len(set(self.tasks.schedule.stages.stage_ranks))


@dataclass(frozen=True, kw_only=True)
class Complete(Scheduled):
    """A program whose ops have their targets, with copies between targets, if the plan names targets; it can be written to files."""


def _names_in(graph: ir.Graph) -> Iterator[str]:
    yield from map(name_of, (*graph.inputs, *graph.initializers.values()))
    for node in graph:
        yield from map(operand_name, node.outputs)
        for body in bodies(node):
            yield from _names_in(body)
