"""A search over plans of a model: facts that are computed once, the candidates with their estimates, and a plan of each.

search = Search.of(source, "model.onnx", 16, Fixed(), Base(), machine, {"batch": 64})
min(search.candidates, key=lambda one: search.estimate(one).seconds)
search.proposal(candidate)             # its plan, compiled

The way of each module over `tp` is the shortest path through its blocks; comments give the time that one way saves against another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partc.compiler.cost.machine import Machine
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Typed
from partc.compiler.pipeline import run_passes
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.plan.stored import EVERY
from partc.compiler.proposal.batch import Batch, batch_of, with_tokens
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.linked import Linked, linked_dims
from partc.compiler.proposal.names import template
from partc.compiler.proposal.propose import BasePlan, Proposal, Work, parsed, taken_apart
from partc.compiler.proposal.stages import Stage, balanced_stages
from partc.compiler.proposal.starting_plan import key
from partc.compiler.proposal.tensor_parallel import TensorParallel, tensor_parallel
from partc.compiler.rewrite.routed import routed
from partc.compiler.search.base_plan import Base
from partc.compiler.search.blocks import Block, Chain, Placing, blocks_of, chain_of, shortest, within
from partc.compiler.search.candidate import SCHEDULES, Candidate, Fixed, baselines, candidates, degrees_of
from partc.compiler.search.estimate import Estimate, Estimates, Sharding, StageWork
from partc.compiler.search.work import ModelWork
from partc.compiler.start import start
from partc.runtime.units import count, seconds

_GAIN = 0.01
"""The least share of the seconds or bytes of all modules that the fastest ways must save, against all sharded, to be a candidate."""


@dataclass(frozen=True)
class Modules:
    """A chain of blocks, the first one before all blocks that can be sharded, and the fastest way of each."""

    chain: Chain
    ways: tuple[Placing, ...]

    @classmethod
    def of(
        cls,
        estimates: Estimates,
        blocks: Sequence[Block],
        degrees: Degrees,
        records: int | None,
        memory: int | None = None,
    ) -> Modules:
        """Returns the ways on these degrees, for a batch of one microbatch; records are sharded if they divide evenly, and in one stage.

        If the fastest ways need more than the memory of a rank, returns the fastest that fit, if there are any.
        """
        if len(blocks) < 2:
            return cls(Chain((), (), ()), ())
        chain = chain_of(estimates, blocks, Candidate(degrees))
        if records is None or records % (degrees.dp * degrees.tp) or degrees.stages > 1:
            for one in chain.seconds:
                one[Placing.RECORDS] = float("inf")
        ways = shortest(chain)
        if memory is not None and chain.cost(ways)[1] > memory:
            ways = within(chain, memory) or ways
        return cls(chain, tuple(map(Placing, ways)))

    @property
    def sharded(self) -> tuple[Placing, ...]:
        """All blocks sharded."""
        return (Placing.WHOLE, *(Placing.SHARDED,) * (len(self.ways) - 1))[: len(self.ways)]

    @property
    def has_records(self) -> bool:
        """Whether the batch is also sharded over `tp`."""
        return self.ways[:1] == (Placing.RECORDS,)

    @property
    def differ(self) -> bool:
        """Whether the fastest ways are neither all sharded, nor all of another kind, which fewer ranks of `tp` could compute as well."""
        return Placing.SHARDED in self.ways[1:] and (self.has_records or self.ways[1:] != self.sharded[1:])

    @property
    def are_worth_it(self) -> bool:
        """Whether the fastest ways differ, and save more time or bytes than the error of an estimate."""
        if not self.differ:
            return False
        pairs = zip(self.difference(self.ways), self.chain.cost(self.sharded), strict=True)
        return any(more < -_GAIN * whole for more, whole in pairs)

    def difference(self, ways: Sequence[Placing]) -> tuple[float, float]:
        """Returns the additional seconds of a step and bytes of a rank of these ways, compared with all sharded."""
        (own, kept), (others, kept_there) = self.chain.cost(ways), self.chain.cost(self.sharded)
        return own - others, kept - kept_there

    def saved(self, ways: Sequence[Placing], blocks: Collection[int]) -> float:
        """Returns the seconds that sharding these blocks saves against replicating them or sharding records, the faster of the two."""
        own, others = self.chain.cost(ways)[0], (Placing.WHOLE, Placing.RECORDS)
        costs = [self.chain.cost([other if k in blocks else way for k, way in enumerate(ways)])[0] for other in others]
        return min(costs) - own if min(costs) < float("inf") else 0.0

    def reason(self, ways: Sequence[Placing], block: int) -> str:
        """Returns the reason for which a block is not sharded."""
        what = "each rank has its part of the records" if ways[block] is Placing.RECORDS else "every rank computes it"
        other = [Placing.SHARDED if k == block else way for k, way in enumerate(ways)]
        more = self.chain.cost(other)[0] - self.chain.cost(ways)[0]
        return f"{what}, which saves about {seconds(more)} of a step" if 0 < more < float("inf") else what


_TWO = Degrees(dp=2)
"""The degrees of the plan with which a model is inspected."""


@dataclass(frozen=True)
class Request:
    """A request for a search: the numbers of ranks and hosts, fixed degrees, settings taken over, the machine, and sizes."""

    ranks: int
    fixed: Fixed
    base: Base
    machine: Machine
    sizes: Mapping[str, int]
    hosts: int = 1
    memory: int | None = None


@dataclass
class Search:
    """A search; `program` is the model, `unsharded` the form of it that shardings apply to."""

    source: Source
    name: str
    request: Request
    program: Typed
    unsharded: Typed
    batch: Batch
    estimates: Estimates
    _stages: dict[int, list[Stage]] = field(default_factory=dict)
    _stage_parts: dict[int, list[StageWork]] = field(default_factory=dict)
    _blocks: dict[int, list[Block]] = field(default_factory=dict)
    _modules: dict[Degrees, Modules] = field(default_factory=dict)
    _shardings: dict[int, tuple[TensorParallel, Sharding]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source, name: str, request: Request) -> Search:
        """Returns a search of the model; raises CompileError with the symbols whose sizes are not known."""
        frame, base = _TWO.frame, request.base
        program = run_passes(start(*parsed(source, frame, name)), routed)
        batch = _batch(source)
        sizes = _sizes(program, batch, request)
        apart = taken_apart(source, frame, name)
        work = ModelWork(apart, sizes, base.trains)
        estimates = Estimates(work, request.machine, request.hosts, base.optimizer, base.bucket, base.messages)
        return cls(source, name, replace(request, sizes=sizes), program, apart, batch, estimates)

    @cached_property
    def records(self) -> int | None:
        """The records of a batch; None if inputs have no dim of records."""
        if not self.batch.inputs:
            return None
        value = next(value for value in self.program.model.graph.inputs if value.name == self.batch.inputs[0])
        shape = self.program.values[value].shape
        first = shape[0] if shape else None
        return first if isinstance(first, int) else self.request.sizes.get(str(first))

    @cached_property
    def repeated(self) -> tuple[str, ...]:
        """Patterns of the outermost modules in lists, such as `layers.*`: recomputation is module by module."""
        members_by_pattern: dict[str, set[str]] = {}
        for path in self.program.paths.values():
            parts = path.split(".")
            at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
            if at is not None:
                prefix = ".".join(parts[: at + 1])
                members_by_pattern.setdefault(template(prefix), set()).add(prefix)
        return tuple(pattern for pattern, members in members_by_pattern.items() if len(members) > 1)

    @cached_property
    def linked(self) -> list[Linked]:
        """The sets of dims that are sharded together."""
        return linked_dims(self.unsharded)

    @cached_property
    def baselines(self) -> dict[str, Candidate]:
        """Maps names to the usual choices that are allowed and possible."""
        most = max((one for one in range(1, self.request.ranks + 1) if self._can_share(one)), default=1)
        fixed = self.request.fixed
        found = baselines(self.request.ranks, self.records, self.request.base.trains, most, fixed.least.cp)
        return {
            name: one for name, one in found.items() if fixed.allows(one.degrees) and self._is_possible(one.degrees)
        }

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All candidates."""
        base = self.request.base
        is_tight = base.trains and self.request.memory is not None
        return [
            one
            for degrees in degrees_of(self.request.ranks, self.request.fixed, self.estimates.work.experts_divisor)
            if self._is_possible(degrees)
            for one in candidates(
                degrees,
                self.records,
                base.trains,
                is_tight and bool(self.repeated),
                base.is_sharded,
                degrees.tp > 1 and self.modules(degrees).are_worth_it,
                self._stages_each(degrees.stages),
                is_tight,
            )
            if not self.has_records(one) or (self.records or 0) % (degrees.dp * degrees.tp * one.microbatches) == 0
        ]

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate of a candidate."""
        estimate = self.estimates.of(candidate, self._sharded(candidate.degrees.tp)[1], self._parts(candidate.stages))
        if not candidate.by_module:
            return estimate
        modules = self.modules(candidate.degrees)
        seconds, bytes = modules.difference(modules.ways)
        return Estimate(
            estimate.seconds + seconds / candidate.degrees.stages, estimate.bytes + bytes / candidate.degrees.stages
        )

    def modules(self, degrees: Degrees) -> Modules:
        """Returns the ways of the modules over `tp`, which are the same for all candidates of these degrees."""
        if degrees not in self._modules:
            if degrees.tp not in self._blocks:
                self._blocks[degrees.tp] = blocks_of(self.estimates, self._sharded(degrees.tp)[0].sets)
            self._modules[degrees] = Modules.of(
                self.estimates, self._blocks[degrees.tp], degrees, self.records, self.request.memory
            )
        return self._modules[degrees]

    def has_records(self, one: Candidate) -> bool:
        """Whether the batch of a candidate is also sharded over `tp`."""
        return one.by_module and self.modules(one.degrees).has_records

    def proposal(self, candidate: Candidate) -> Proposal:
        """Returns the plan of a candidate; raises CompileError if the compiler refuses it."""
        degrees = candidate.degrees
        stages = self._balanced(candidate.stages)
        if len(stages) < candidate.stages > 1:
            parts = count(len(stages), "part") if stages else "1 part"
            fact = f"{candidate.stages} stages: the model has {parts} with weights, one behind the other"
            raise CompileError(Problem(self.name, fact, help=f"take {count(max(1, len(stages)), 'stage')} or fewer"))
        sharding = self._written(candidate) if degrees.tp > 1 else None
        over = degrees.dp * (degrees.tp if sharding is not None and sharding.has_records else 1)
        batch = batch_of(self.source, over * candidate.microbatches)
        if degrees.cp > 1:
            batch = with_tokens(self.source, self.unsharded, batch, degrees.cp)
        sections = (*self._stored(candidate), *self._pipeline(candidate))
        sections += self.request.base.written(candidate.zero, degrees.ep > 1)
        more = BasePlan((), sections, self.request.base.trains, listed=False)
        work = Work(self.source, self.name, degrees, batch, self.program, stages, base=more)
        return work.proposed(sharding)

    def _written(self, candidate: Candidate) -> TensorParallel:
        """Returns the shardings of a candidate, each with the time that it saves."""
        modules, sets = self.modules(candidate.degrees), self._sharded(candidate.degrees.tp)[0].sets
        ways = modules.ways if candidate.by_module else modules.sharded
        number = {id(linked): k for k, linked in enumerate(sets, 1)}

        def told(some: Sequence[Linked]) -> str:
            saved = modules.saved(ways, [number[id(linked)] for linked in some])
            return f"; saves about {seconds(saved)} of a step" if saved > 0 else ""

        whole = {k - 1: modules.reason(ways, k) for k, way in enumerate(ways) if k and way is not Placing.SHARDED}
        paths = self.program.paths.values()
        found = tensor_parallel(self.unsharded, paths, candidate.degrees.tp, None, whole, self.linked, told)
        return replace(found, has_records=candidate.by_module and modules.has_records)

    def _stored(self, candidate: Candidate) -> tuple[str, ...]:
        """Returns the lines of stored parameters."""
        if not candidate.stored:
            return ()
        each = candidate.microbatches > 1 and not self.request.base.keeps_rest
        often = ("stored: {reduce: microbatch}",) if each else ()
        return (
            f"parameters: {{'{EVERY}': {{stored: dp}}}}   # a shard on each rank of dp, gathered unit by unit",
            *often,
            "",
        )

    def _pipeline(self, candidate: Candidate) -> tuple[str, ...]:
        """Returns the lines of `pipeline`, with the stages if a group has several; otherwise `placement` places the stages."""
        if candidate.microbatches == 1 and not candidate.recompute:
            return ()
        options = [f"microbatches: {candidate.microbatches}"]
        options += [f"schedule: {candidate.schedule}"] if candidate.schedule else []
        options += ["statistics: microbatch"] if self.request.base.statistics and candidate.microbatches > 1 else []
        options += [f"recompute: [{', '.join(map(key, self.repeated))}]"] if candidate.recompute else []
        if candidate.stages_each == 1:
            return (f"pipeline: {{{', '.join(options)}}}", "")
        lines = [f"pipeline:   # each group has {candidate.stages_each} stages", *(f"  {option}" for option in options)]
        lines.append("  stages:")
        for k, (stage, home) in enumerate(zip(self._balanced(candidate.stages), candidate.stage_groups, strict=True)):
            lines.append(f"    # stage {k}, on group {home}: {stage.reason}")
            lines.append(f"    - [{', '.join(map(key, stage.lines()))}]")
        return (*lines, "")

    def _parts(self, count: int) -> list[StageWork]:
        """Returns the share of the model of each of `count` stages."""
        if count not in self._stage_parts:
            parts, sizes = list[StageWork](), TypicalSizes(self.program, self.request.sizes)
            for stage in self._balanced(count):
                own = {value for node in stage.nodes for value in node.outputs}
                read = {
                    value for node in stage.nodes for value in node.inputs if value is not None and value.producer()
                }
                parts.append(StageWork(sum(unit.work for unit in stage.units), sum(map(sizes.bytes_of, read - own))))
            self._stage_parts[count] = parts or [StageWork()]
        return self._stage_parts[count]

    def _stages_each(self, groups: int) -> list[int]:
        """Returns the possible numbers of stages of each of `groups` groups: there are enough units with weights for all stages."""
        some = dict.fromkeys(many for _, many in SCHEDULES) if groups > 1 else [1]
        return [many for many in some if many == 1 or len(self._balanced(groups * many)) == groups * many]

    def _balanced(self, count: int) -> list[Stage]:
        if count not in self._stages:
            self._stages[count] = balanced_stages(self.program, count, self.request.machine) if count > 1 else []
        return self._stages[count]

    def _sharded(self, shards: int) -> tuple[TensorParallel, Sharding]:
        """Returns everything that can be sharded over `shards` ranks."""
        if shards not in self._shardings:
            paths, found = self.program.paths.values(), TensorParallel((), (), ())
            if shards > 1:
                found = tensor_parallel(self.unsharded, paths, shards, linked=self.linked)
            self._shardings[shards] = found, Sharding.of(self.estimates.work, found.places)
        return self._shardings[shards]

    def _can_share(self, shards: int) -> bool:
        return self.request.ranks % shards == 0 and (shards == 1 or bool(self._sharded(shards)[0].groups))

    def _is_possible(self, degrees: Degrees) -> bool:
        """Whether enough dims can be sharded over the `tp` ranks, and there are units for all stages."""
        return self._can_share(degrees.tp) and degrees.stages in (1, len(self._balanced(degrees.stages)))


def _batch(source: Source) -> Batch:
    try:
        return batch_of(source, _TWO.dp)
    except CompileError:
        return Batch()


def _sizes(program: Typed, batch: Batch, request: Request) -> dict[str, int]:
    """Returns the sizes of all symbols: the given ones, a training's batch, or the only legal size."""
    first, known = next(iter(batch.symbols), None), dict[str, int]()
    problems = [
        Problem(
            f"--set {name}",
            "the model has no such symbol",
            help=f"its symbols are {', '.join(program.symbols) or 'none'}",
        )
        for name in request.sizes
        if name not in program.symbols
    ]
    for name, info in program.symbols.items():
        only = info.facts.value
        if name in request.sizes:
            known[name] = request.sizes[name]
        elif name == first and request.base.batch is not None:
            known[name] = request.base.batch
        elif only is not None:
            known[name] = only
        else:
            option = "--batch 64" if name == first else f"--set {name}=128"
            fact = f"the size of '{name}' is not known, by which times are computed"
            problems.append(Problem(program.name, fact, help=f"give it, such as {option}"))
    if problems:
        raise CompileError(problems)
    return known
