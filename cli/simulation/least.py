"""What a candidate of a search takes at least: the nodes of the unsharded program, at the sizes of a rank of it.

    step       the longest of ways and work, beside what any step takes
    work       microbatches * task / stages + update: the mean of all ranks, which the slowest is not below
    ways       of each stage: the tasks forward of those before it, its own of all microbatches, and what is behind them: the tasks back
               of the stages before, and on the first one the reductions, gathers and updates of what it has; or its own of these
    task       of nodes and sums of layers, as `Sets.took`; several microbatches add up gradients, and transpose weights in each task
    undivided  a batch of one microbatch has no tasks: what is between values that stages hand on follows one another, reductions begin
               behind the first gradient of a stage, and gathers behind all that is computed there

How layers are shared is learned of the first candidate over `tp` that was played, in however many stages and microbatches: which nodes
ranks have whole, and the sums. Others over as many, or over others that shard the same dims, have the same sums, less those that a message
between stages may take along. What is not known to be whole takes an even shard at least (`NodeCost.in_even_shards`). Modules that are
sharded in several ways have no sums here. A node that several stages may have counts in the mean of all. No wait is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from partc.cli.simulation.actions import Pricing, least_of
from partc.cli.simulation.known_program import Layers, Mask, Program, Seconds
from partc.cli.simulation.node_sets import Placed, Priced, Sets, Shared
from partc.cli.simulation.step import Simulation
from partc.cli.simulation.update_work import functions_of, parameters_of, reduced
from partc.compiler.cost.machine import FALLBACK, Machine
from partc.compiler.cost.price import Operand
from partc.compiler.search.candidate import SCHEDULES, Candidate
from partc.compiler.search.reductions import least_seconds, seconds_of
from partc.compiler.search.search import Search, named_stage
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, CPU
from partc.runtime.program.steps import Segment, Update
from partc.runtime.updates.updater import SHARD

if TYPE_CHECKING:
    from onnx import FunctionProto

_MOST_ITEM = 8
"""The most bytes of an element of a gradient."""


class Least:
    """Seconds of candidates of a search on a machine, by the unsharded program `whole`; by its work alone where its batch has no symbol."""

    def __init__(self, search: Search, whole: Simulation, machine: Machine) -> None:
        self.search, self.machine, self.pricing = search, machine, Pricing(machine)
        (sizes,) = whole.files.values()
        self.update = sum(self.pricing.least(step, sizes) for step in sizes.file.steps if isinstance(step, Update))
        self.work = self.update + sum(
            self.pricing.least(step, sizes) for step in sizes.file.steps if isinstance(step, Segment)
        )
        self.reduced = sum(reduced(step, sizes) for step in sizes.file.steps if isinstance(step, Update))
        updates = [step for step in sizes.file.steps if isinstance(step, Update)]
        self.updated = [pair for step in updates for pair in functions_of(step, sizes)]
        buckets = search.estimates.reductions.calls((), 1, 1, False)
        is_same = sum(bytes * many for (_, bytes), many in buckets.items()) == self.reduced
        self.has_buckets = is_same and not search.request.base.is_sharded
        self.parameters = [one for step in updates for one in parameters_of(step, sizes)]
        symbol = next(iter(search.batch.symbols), "")
        scales = search.records is not None and search.request.sizes.get(symbol) == search.records
        self.symbol = symbol if scales and not self.machine.segments else ""
        self.program = Program(sizes, self.pricing, self.symbol) if self.symbol else None
        self._layers: dict[int, Layers] = {}
        self._costs: dict[Hashable, tuple[Seconds, Seconds]] = {}
        self._total: dict[Hashable, tuple[float, float]] = {}
        self._placed: dict[int, Placed] = {}
        self._shared: dict[tuple[int, int], Shared] = {}
        self._sets: dict[Hashable, dict[str, Sets]] = {}
        self._tasks: dict[Hashable, dict[str, Seconds]] = {}
        self._ways: dict[Hashable, float] = {}
        self._updates: dict[Hashable, float] = {}
        self._at_stages: dict[Hashable, Seconds] = {}
        self._calls: dict[Hashable, tuple[float, float]] = {}
        self._names: dict[int, list[frozenset[str]]] = {}

    def learn(self, one: Candidate, simulation: Simulation) -> None:
        """Takes how layers are shared from a candidate over `tp` that was played."""
        tp = one.degrees.tp
        if self.program is not None and tp > 1 and not (one.by_module or one.recompute) and tp not in self._layers:
            self._layers[tp] = self.program.layers(one, simulation.files.values())
            for kept in (self._costs, self._total, self._ways, self._tasks):
                kept.clear()

    def shared(self, ranks: int) -> float:
        """Seconds that no plan on so many ranks is below, whatever it shards."""
        cores = self.machine.cores * self.search.request.hosts
        return self._beside(ranks) + self.work / (min(ranks, cores) if cores else ranks)

    def _beside(self, ranks: int) -> float:
        """Seconds of any step: what it does beside its actions, and the agreement of all ranks before the first of them."""
        return self.machine.processor(CPU).step + self.machine.links[0].collective(ALL_REDUCE, ranks, 0)

    def __call__(self, one: Candidate) -> float:
        """Seconds that no step of a candidate is below."""
        if self.program is None:
            return self.quick(one)
        key = one.degrees, one.microbatches, one.schedule, one.stages_each, one.zero, one.by_module
        if key not in self._ways:
            self._ways[key] = self._way(one)
        return max(self.quick(one), self._beside(one.degrees.ranks) + self._ways[key])

    def _way(self, one: Candidate) -> float:
        """Seconds of the rank that takes longest, from its first node to its last collective."""
        if one.schedule not in ("", *dict(SCHEDULES)):
            return 0.0
        took, count, many = self._took(one), one.stages, one.microbatches
        updates, after = (
            self._updates_at(one),
            np.array([self._after(one, stage) for stage in range(count)], dtype=np.float64),
        )
        hops = np.arange(count, dtype=np.float64) * min(link.send.least for link in self.machine.links)
        placed = self._on_stages(count)
        if many == 1:
            return max(self._reduction(one), self._undivided(placed, took, updates, after, hops))
        forward, rest = took["forward"], took["rest"]
        groups, homes = one.degrees.stages, [*one.homes]

        def of_groups(of_stages: Seconds) -> Seconds:
            """By group the sum of its stages."""
            found = np.zeros(groups)
            np.add.at(found, homes, of_stages)
            return found

        ends = of_groups(updates)
        np.maximum.at(ends, homes, after.max(axis=1))
        ways = of_groups(many * (forward + rest)) + ends
        if not placed.is_chain or count == 1:
            return float(ways.max())
        heads = np.cumsum(forward) - forward + hops
        if not placed.trains:
            return float((heads + ways + forward.sum() - np.cumsum(forward)).max())
        back, until = took["back"], rest
        if one.schedule in ("zb_h1", "zbv"):
            back = until = np.concatenate([back[:1], np.minimum(back, took["early"])[1:]])
        tails = np.cumsum(back) - back + hops + ends[0]
        through = heads + many * (forward + until) + tails
        drained = (
            heads[:groups] + of_groups(many * (forward + until)) + tails[:groups]
        )  # a group's first stage is its lowest
        loose = many * float(took["loose"][0]) / groups  # on one of these stages, so in their mean
        mean = (heads[:groups] + ways).mean() + loose
        if one.schedule in ("1f1b", "interleaved"):
            mean = max(mean, drained.mean() + loose)
        return float(max((heads[:groups] + ways).max(), drained[1:].max(), through[1:].max(), mean))

    def _undivided(
        self, placed: Placed, took: Mapping[str, Seconds], updates: Seconds, after: Seconds, hops: Seconds
    ) -> float:
        """The same of a batch that is not divided: reductions begin once the first gradient of a stage is there."""
        count = placed.count
        reduced, gathered = after.T
        longest = float((took["own"] + np.maximum(updates, gathered)).max())
        if not placed.is_chain:
            return longest
        way = took["way"]
        first = 0 if placed.trains else count - 1
        longest = max(
            longest,
            float(way.sum() + (len(way) - 1) * hops[-1] / max(1, count - 1) + max(updates[first], gathered[first])),
        )
        for stage in range(count) if placed.trains else ():
            is_behind = bool(placed.waits[stage][placed.gradients[stage]].all())
            before = float(way[: 2 * (count - 1) - stage].sum()) if is_behind else 0.0
            longest = max(longest, before + float(took["first"][stage] + reduced[stage]))
        return longest

    def _took(self, one: Candidate) -> Mapping[str, Seconds]:
        """By name of sets of nodes, one for each stage or for each part of the way, their seconds on a rank of a candidate."""
        key = self._key(one), one.stages, one.microbatches > 1
        if key not in self._tasks:
            priced, sets = self._priced(one), self._sets_of(one)
            added = self._added if one.microbatches > 1 else 0.0
            self._tasks[key] = {
                name: some.took(priced, 0.0 if name == "forward" else added) for name, some in sets.items()
            }
        return self._tasks[key]

    def _sets_of(self, one: Candidate) -> Mapping[str, Sets]:
        """The sets of nodes by which a candidate is bounded, on its stages."""
        count, layers = one.stages, self._layers_of(one)
        key = count, layers[0] if layers is not None else 0, one.microbatches > 1
        if key not in self._sets:
            placed = self._on_stages(count)
            shared = self._shared_of(one)
            pairs = zip(placed.own, placed.forward, strict=True)
            sets: dict[str, Sequence[Mask]] = {"own": placed.own}
            if one.microbatches > 1:
                sets = {"forward": placed.forward, "rest": [own & ~nodes for own, nodes in pairs]}
            if placed.is_chain and one.microbatches > 1 and count > 1:
                sets |= {"back": placed.back, "early": placed.early, "loose": [placed.loose]}
            if placed.is_chain and one.microbatches == 1:
                sets |= {"way": placed.way, "first": placed.first}
            self._sets[key] = {
                name: Sets(placed, shared, some, ~placed.of_weights if name == "early" else None)
                for name, some in sets.items()
            }
        return self._sets[key]

    def _shared_of(self, one: Candidate) -> Shared | None:
        """The sums of layers of a candidate; None where they are not known, or there are none."""
        if (layers := self._layers_of(one)) is None:
            return None
        key = one.stages, layers[0]
        if key not in self._shared:
            self._shared[key] = Shared(self._on_stages(one.stages), layers[1])
        return self._shared[key]

    def _priced(self, one: Candidate) -> Priced:
        """The nodes of a candidate at its sizes."""
        assert self.program is not None
        least, most = self._seconds(one)
        degrees, links = one.degrees, self.machine.links
        parts, sums = degrees.dp * one.microbatches, np.zeros(0)
        adding = self.program.adding(parts, degrees.tp) if one.microbatches > 1 else None

        def of(bytes: float) -> float:
            return min(link.collective(ALL_REDUCE, degrees.tp, bytes) for link in links)

        if (shared := self._shared_of(one)) is not None:
            sums = shared.seconds(parts, of)
        session, overlap = self.machine.processor(CPU).session, min(link.overlap for link in links)
        return Priced(least, most, sums, overlap, session, adding)

    def _layers_of(self, one: Candidate) -> tuple[int, Layers] | None:
        """How layers are shared, as plans over so many ranks or others that shard the same dims have it; with the number of those."""
        tp = one.degrees.tp
        if one.by_module or tp == 1:
            return None
        some = [known for known in self._layers if known == tp or self.search.is_sharded_alike(known, tp)]
        known = tp if tp in some else min(some, default=0)
        return (known, self._layers[known]) if known else None

    def _on_stages(self, count: int) -> Placed:
        """The nodes by stages of so many."""
        assert self.program is not None
        if count not in self._placed:
            stage_of = self.search.stage_of(count) if count > 1 else {}
            may_have = self.search.stages_of(count) if count > 1 else {}

            def stages(path: str) -> range:
                named = named_stage(stage_of, path)
                return may_have.get(path, range(0)) if named is None else range(named, named + 1)

            self._placed[count] = Placed(self.program, count, stages)
        return self._placed[count]

    @cached_property
    def _added(self) -> float:
        """Seconds in which a rank adds the gradients of all parameters to those of the microbatches before, at most."""
        kernel = self.machine.processor(CPU).kernel(FALLBACK)
        return sum(kernel(3.0 * _MOST_ITEM * elements) for elements, _ in self.parameters)

    def quick(self, one: Candidate) -> float:
        """The same by the work alone."""
        degrees, shared = one.degrees, self.shared(one.degrees.ranks)
        if not self.symbol:
            return shared
        once, repeated = self._once_and_repeated(one)
        update = self.updates(one) / degrees.stages
        turns = self.search.estimates.turns(degrees.ranks)
        sessions = one.microbatches * one.stages_each * self.machine.processor(CPU).session
        work = turns * (update + sessions + (once + one.microbatches * repeated) / degrees.stages)
        return max(shared, self._beside(degrees.ranks) + work)

    def updates(self, one: Candidate) -> float:
        """Seconds of the updates of all stages on one rank of each; of ZeRO a shard of each parameter, side by side as all of them."""
        if not one.zero:
            return self.update * self.search.own_share(one)
        shards = one.degrees.tp * one.degrees.dp
        return sum(self._of_shard(*pair, shards) for pair in self.updated)

    def _of_shard(self, function: FunctionProto, operands: Sequence[Operand], shards: int) -> float:
        """Seconds of the update of one of so many shards."""
        given = tuple(Operand((max(1, math.prod(one.sizes or ()) // shards),), one.item) for one in operands)
        key = function.name, given
        if key not in self._updates:
            self._updates[key] = least_of(function, given, self.machine.processor(CPU))
        return self._updates[key]

    def updating(self, share: float) -> float:
        """Seconds of the update of a share of all parameters on a rank, as it is played."""
        total = 0.0
        for function, operands in self.updated:
            sizes = (math.prod(one.sizes or ()) for one in operands)
            given = tuple(
                one if many == 1 else Operand((max(2, round(share * many)),), one.item)
                for one, many in zip(operands, sizes, strict=True)
            )
            key = function.name, given, share
            if key not in self._updates:
                self._updates[key] = self.pricing.function(function, given, self.machine.processor(CPU), SHARD)
            total += self._updates[key]
        return total

    def _updates_at(self, one: Candidate) -> Seconds:
        """By stage the seconds of the updates of what is read there alone."""
        shards, count = one.degrees.tp * (one.degrees.dp if one.zero else 1), one.stages
        key = shards, count
        if key not in self._at_stages:
            each = self.update / max(1, sum(own for own, _ in self.parameters)) / shards
            found = self._at_stages[key] = np.zeros(count)
            for elements, names in self.parameters:
                if (stage := self._stage_of(names, count)) is not None:
                    found[stage] += each * elements
        return self._at_stages[key]

    def _stage_of(self, names: Collection[str], count: int) -> int | None:
        """The stage of so many on which all readers of some values are."""
        assert self.program is not None
        stages = {int(self._on_stages(count).stage[at]) for name in names for at in self.program.readers.get(name, ())}
        return stages.pop() if len(stages) == 1 and -1 not in stages else None

    def computed(self, one: Candidate) -> float | None:
        """Seconds of a microbatch on a rank, of all stages; None where it is not known how layers are shared."""
        if self.program is None or (one.degrees.tp > 1 and self._layers_of(one) is None):
            return None
        return sum(self._once_and_repeated(one))

    def _once_and_repeated(self, one: Candidate) -> tuple[float, float]:
        """Seconds of a microbatch in all stages, first those that do not depend on the batch."""
        assert self.program is not None
        key = self._key(one)
        if key not in self._total:
            least, _ = self._seconds(one)
            repeated = self.program.repeated
            self._total[key] = float(least[~repeated].sum()), float(least[repeated].sum())
        return self._total[key]

    def _key(self, one: Candidate) -> Hashable:
        """By what the seconds of a candidate's nodes differ."""
        return (
            one.degrees.dp * one.microbatches,
            one.degrees.tp,
            one.by_module,
            self.search.has_records(one) and one.degrees,
        )

    def _seconds(self, one: Candidate) -> tuple[Seconds, Seconds]:
        """By node its seconds on a rank of a candidate at least, and at most."""
        assert self.program is not None
        key = self._key(one)
        if key not in self._costs:
            program, parts, tp = self.program, one.degrees.dp * one.microbatches, one.degrees.tp
            exact, least = program.seconds(parts, tp)
            if self.search.has_records(one):
                own, _ = program.seconds(parts * tp)
                paths = self.search.with_records(one.degrees)
                least = np.where([path in paths for path in program.paths], own, least)
            elif (layers := self._layers_of(one)) is not None:
                least = np.where(layers[1].is_whole, exact, least)
            elif tp > 1:
                paths = self.search.whole(tp)
                least = np.where([path in paths for path in program.paths], exact, least)
            self._costs[key] = least, exact
        return self._costs[key]

    def _after(self, one: Candidate, stage: int) -> tuple[float, float]:
        """Seconds of the collectives for the gradients of what is read on a stage alone, and of those for what is updated there."""
        degrees = one.degrees
        if degrees.dp == 1 or not self.has_buckets:
            return 0.0, 0.0
        key = degrees, one.stages, stage, one.zero, one.by_module
        if key not in self._calls:
            names = self._of_stage(one.stages)[stage]
            calls = self.search.reductions(one, names)
            gathers = Counter({call: many for call, many in calls.items() if call[0] == ALL_GATHER})
            links = self.machine.links
            pair = (
                min(link.overlap * seconds_of(some, link, degrees.dp) for link in links) for some in (calls, gathers)
            )
            both, last = pair
            self._calls[key] = both, last
        return self._calls[key]

    def _of_stage(self, count: int) -> list[frozenset[str]]:
        """By stage of so many the names of the parameters that are read there alone."""
        if count not in self._names:
            found: list[set[str]] = [set() for _ in range(count)]
            for _, names in self.parameters:
                if (stage := self._stage_of(names, count)) is not None:
                    found[stage].update(names)
            self._names[count] = [frozenset(some) for some in found]
        return self._names[count]

    def _reduction(self, one: Candidate) -> float:
        """The reduction of a rank's gradients, in the mean of stages as many bytes in however many collectives over the fastest link."""
        degrees, links = one.degrees, self.machine.links
        given = self.reduced * self.search.own_share(one) / degrees.stages
        return min(link.overlap * least_seconds(link, degrees.dp, given, one.zero) for link in links)
