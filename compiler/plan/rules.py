"""The plan as rules for the compiler: the contents of a plan file, with the line of every rule.

`where` is `file:line` for messages. Placement, sharding and output rules are in the order of the file: if two match, the later one wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from partc.compiler.dims.symbol import Symbol
from partc.compiler.plan.groups import DATA_AXIS, Axes, axes_of, spanned, workers_of
from partc.compiler.plan.shard_spec import ShardSpec
from partc.compiler.plan.stored import StoredRules

if TYPE_CHECKING:
    from partc.compiler.plan.adapters import AdapterRule
    from partc.compiler.plan.context import ContextRules
    from partc.compiler.plan.experts import ExpertsRule
    from partc.compiler.plan.generate import GenerateRules
    from partc.compiler.plan.pipeline import PipelineRules
    from partc.compiler.plan.precision import MessageRules, PrecisionRules, QuantizeRule
    from partc.compiler.plan.target import TargetRule
    from partc.compiler.plan.training.rules import TrainRules

FULL_BATCH, DATA_PARALLEL = "full_batch", "data_parallel"


@dataclass(frozen=True)
class SymbolRule:
    """The declaration of a symbol."""

    symbol: Symbol
    where: str


@dataclass(frozen=True)
class InputRule:
    """The dims of an input: a size, a symbol or the name of a free dim, or None for a dim that the plan leaves open."""

    dims: tuple[int | str | None, ...]
    where: str


@dataclass(frozen=True)
class BatchDim:
    """The dim of an input that is the records of a batch; None if it has no records."""

    dim: int | None
    where: str


@dataclass(frozen=True)
class PlacementRule:
    """A rule that runs matched nodes on these ranks, a group in this order; `axes` are the mesh's axes within the group."""

    pattern: str
    ranks: tuple[int, ...]
    where: str
    axes: Axes = ()
    serves: bool = False
    """Whether the ranks only store and serve the parameters of matched nodes, and do not run these."""


@dataclass(frozen=True)
class RegionCall:
    """One call of a function or module: the names of its argument and result tensors, in the call's order."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class ShardingRule:
    """A rule that shards matched nodes: by a style, or by specs in one spelling.

    `inputs`, `outputs`: an entry for each tensor, None for one that is derived; None for all if the plan does not say. For a node they are
    its operands; for a module they are the arguments of each call in `calls`, or without calls the values that enter it in the order in
    which its nodes first read them. `parameters`: specs by the path below the module. `packed`: the number of equal parts of a colwise
    weight, or their sizes. `gathers`: whether the module's outputs are replicated on every rank.
    """

    pattern: str
    style: str | None
    inputs: tuple[ShardSpec | None, ...] | None
    outputs: tuple[ShardSpec | None, ...] | None
    parameters: Mapping[str, ShardSpec]
    where: str
    level: int = 0
    calls: tuple[RegionCall, ...] = ()
    packed: int | tuple[int, ...] | None = None
    gathers: bool = False


@dataclass(frozen=True)
class DatasetSpec:
    """The sharding in which an input arrives: every rank is fed its shard."""

    spec: ShardSpec
    where: str


@dataclass(frozen=True)
class Dataset:
    """The way in which inputs arrive: replicated on every rank (full_batch), dim 0 sharded over all ranks (data_parallel), or as in
    `specs`.

    An input that `specs` does not name arrives replicated. `where` is empty if the plan does not say. `order`: specs in the order of the
    inputs, until their names are known.
    """

    style: str = FULL_BATCH
    specs: Mapping[str, DatasetSpec] = field(default_factory=dict)
    where: str = ""
    order: tuple[ShardSpec | None, ...] = ()


@dataclass(frozen=True)
class OutputRule:
    """A rule that delivers outputs with matching names to these ranks, in ascending order; None: they stay on the ranks that make them.

    `sharded`: whether they keep their layout, a shard on each rank; otherwise they are replicated.
    """

    pattern: str
    ranks: tuple[int, ...] | None
    where: str
    sharded: bool = False


@dataclass(frozen=True)
class DimRules:
    """The plan's rules for the dims of inputs: symbols, sizes, and the dims of a batch's records."""

    symbols: Mapping[str, SymbolRule] = field(default_factory=dict)
    inputs: Mapping[str, InputRule] = field(default_factory=dict)
    batch_dims: Mapping[str, BatchDim] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankRules:
    """The ranks of a job, 0 .. ranks - 1: the mesh that names their axes, and the roles of ranks that only serve."""

    ranks: int
    mesh: Axes = ()
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def axes_of(self, group: tuple[int, ...]) -> Axes:
        """Returns the mesh axes within a group of ranks, in order; none if the mesh does not apply to the group."""
        return axes_of(self.mesh, spanned(self.mesh, self.ranks, len(self.workers)), group)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that run nodes without a placement: all but those that serve."""
        return workers_of(self.ranks, self.roles.values())


@dataclass(frozen=True)
class Elastic:
    """The `plans` of an elastic training for its further numbers of ranks, and the steps between copies of its state; 0 without copies."""

    plans: Mapping[int, Plan] = field(default_factory=dict)
    copies: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan(RankRules):
    """A valid plan: every rank is in 0 .. ranks - 1, every pattern compiles, every symbol has a legal size.

    Shardings name only axes of the mesh; whether they fit an op, a value or a group is not yet checked.
    """

    file: str = ""
    dims: DimRules = DimRules()
    placement: tuple[PlacementRule, ...] = ()
    outputs: tuple[OutputRule, ...] = ()
    dataset: Dataset = field(default_factory=Dataset)
    sharding: tuple[ShardingRule, ...] = ()
    stored: StoredRules = field(default_factory=StoredRules)
    max_reshard_bytes: int | None = None
    train: TrainRules | None = None
    pipeline: PipelineRules | None = None
    precision: PrecisionRules | None = None
    messages: MessageRules | None = None
    quantize: tuple[QuantizeRule, ...] = ()
    target: tuple[TargetRule, ...] = ()
    generate: GenerateRules | None = None
    adapters: tuple[AdapterRule, ...] = ()
    elastic: Elastic = Elastic()
    experts: tuple[ExpertsRule, ...] = ()
    context: ContextRules | None = None

    @staticmethod
    def whole() -> Plan:
        """Returns the plan of an unsharded model: one rank, without placements."""
        return Plan(ranks=1)


def batch_shards(plan: Plan, name: str) -> int:
    """Returns the number of shards over which the records of an input are dealt."""
    sizes = dict(plan.mesh)
    given = plan.dataset.specs.get(name)
    if given is not None:
        first = given.spec[0] if given.spec else 1
        return first if isinstance(first, int) else math.prod(sizes[axis] for axis in first)
    if plan.dataset.style != DATA_PARALLEL:
        return 1
    return sizes.get(DATA_AXIS, len(plan.workers)) if plan.mesh else len(plan.workers)
