"""What a candidate of a search takes at least: the nodes of the unsharded program, at the sizes of a rank of it.

    step       the longest of these, beside what any step takes
    work       microbatches * task / stages + update: the mean of all ranks, which the slowest is not below
    ways       of a group of stages: the tasks forward of the stages before its first one, its own of all microbatches, and what is behind
               the last of its tasks: collectives for its gradients, and updates
    longest    the nodes of one microbatch that follow one another, on whichever ranks
    rows       ways by the rows of a schedule over a chain of stages, whose tasks wait for each other and for messages (`rows.py`)
    task       of nodes and sums of layers, as `Sets.took`; several microbatches add up gradients, and transpose weights in each task
    undivided  a batch of one microbatch has no tasks: what is between values that stages hand on follows one another, reductions begin
               behind the first gradient of a stage, and gathers behind all that is computed there

How layers are shared is learned of the first candidate over `tp` that was played, in however many stages and microbatches: which nodes
ranks have whole, and the sums. Others over as many, or over others that shard the same dims, have the same sums, less those that a message
between stages may take along. Of all others it is known which sums wait for each other (`ModelWork.chained_sums`). What is not known to be
whole takes an even shard at least (`NodeCost.in_even_shards`). A node that several stages may have counts in the mean of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import numpy as np
from partc.cli.simulation.actions import Pricing
from partc.cli.simulation.known_program import Layers, Mask, Program, Seconds
from partc.cli.simulation.node_sets import Placed, Priced, Sets, Shared
from partc.cli.simulation.rows import Times, ends_of
from partc.cli.simulation.step import Simulation
from partc.cli.simulation.updating import Updating
from partc.compiler.cost.machine import FALLBACK, Machine
from partc.compiler.search.candidate import SCHEDULES, Candidate
from partc.compiler.search.search import Search, named_stage
from partc.runtime.artifact.format import ALL_REDUCE, CPU, REDUCE_SCATTER
from partc.runtime.program.steps import Segment

_MOST_ITEM = 8
"""The most bytes of an element of a gradient."""


class Least:
    """Seconds of candidates of a search on a machine, by the unsharded program `whole`; by its work alone where its batch has no symbol."""

    def __init__(self, search: Search, whole: Simulation, machine: Machine) -> None:
        self.search, self.machine, self.pricing = search, machine, Pricing(machine)
        (sizes,) = whole.files.values()
        self.updating = Updating(search, self.pricing, sizes, self._on_stages)
        self.work = self.updating.seconds + sum(
            self.pricing.least(step, sizes) for step in sizes.file.steps if isinstance(step, Segment)
        )
        symbol = next(iter(search.batch.symbols), "")
        scales = search.records is not None and search.request.sizes.get(symbol) == search.records
        self.symbol = symbol if scales and not self.machine.segments else ""
        self.program = Program(sizes, self.pricing, self.symbol) if self.symbol else None
        self._layers: dict[int, Layers] = {}
        self._costs: dict[Hashable, tuple[Seconds, Seconds]] = {}
        self._total: dict[Hashable, tuple[float, float]] = {}
        self._placed: dict[tuple[int, bool], Placed] = {}
        self._shared: dict[Hashable, Shared] = {}
        self._sets: dict[Hashable, dict[str, Sets]] = {}
        self._tasks: dict[Hashable, dict[str, Seconds]] = {}
        self._ways: dict[Hashable, float] = {}
        self._rows: dict[Hashable, float] = {}
        self._sent: dict[Hashable, Seconds] = {}
        self._chained: dict[Hashable, float] = {}
        self._follow: dict[Hashable, float] = {}

    def learn(self, one: Candidate, simulation: Simulation) -> None:
        """Takes how layers are shared from a candidate over `tp` that was played."""
        tp = one.degrees.tp
        if self.program is not None and tp > 1 and not (one.by_module or one.recompute) and tp not in self._layers:
            self._layers[tp] = self.program.layers(one, simulation.files.values())
            for kept in (self._costs, self._total, self._ways, self._rows, self._tasks, self._follow):
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
        least = self.ways(one)
        if self.program is None or one.microbatches == 1 or not one.schedule:
            return least
        key = self._way_key(one)
        if key not in self._rows:
            self._rows[key] = self._row(one)
        return max(least, self._beside(one.degrees.ranks) + self._rows[key])

    def ways(self, one: Candidate) -> float:
        """The same, without the rows of a schedule."""
        if self.program is None:
            return self.quick(one)
        key = self._way_key(one)
        if key not in self._ways:
            self._ways[key] = max(self._way(one), self._chained_sums(one), self._longest(one))
        return max(self.quick(one), self._beside(one.degrees.ranks) + self._ways[key])

    def _way_key(self, one: Candidate) -> Hashable:
        """By what the ways of candidates differ."""
        return one.degrees, one.microbatches, one.schedule, one.stages_each, one.zero, one.by_module

    def _way(self, one: Candidate) -> float:
        """Seconds of the rank that takes longest, from its first node to its last collective."""
        if one.schedule not in ("", *dict(SCHEDULES)):
            return 0.0
        took, count, many = self._took(one), one.stages, one.microbatches
        hops = np.arange(count, dtype=np.float64) * min(link.send.least for link in self.machine.links)
        placed = self._on_stages(one.staging)
        if many == 1:
            return max(self.updating.reduction(one), self._undivided(one, placed, took, hops))
        forward, rest = took["forward"], took["rest"]
        groups, homes = one.degrees.stages, [*one.homes]
        ways = self.updating.behind_tasks(one).copy()
        np.add.at(ways, homes, many * (forward + rest))
        if not placed.is_chain or count == 1:
            return float(ways.max())
        heads = np.cumsum(forward) - forward + hops
        if not placed.trains:
            return float((heads + ways + forward.sum() - np.cumsum(forward)).max())
        return float((heads[:groups] + ways).max())

    def _longest(self, one: Candidate) -> float:
        """Seconds of the nodes of a microbatch that follow one another, on whichever stages; of one stage it has all in any case."""
        if one.stages == 1 or self.program is None:
            return 0.0
        key = self._key(one)
        if key not in self._follow:
            self._follow[key] = self.program.longest(self._seconds(one)[0])
        return self._follow[key]

    def _chained_sums(self, one: Candidate) -> float:
        """Seconds of sums over the ranks of a layer of which each waits for the one before, where no plan says which there are.

        Each is a ReduceScatter at least; a rank has those of its stages, of each microbatch.
        """
        degrees, links = one.degrees, self.machine.links
        if degrees.tp == 1 or self._layers_of(one) is not None:
            return 0.0
        key = degrees.tp, degrees.dp * one.microbatches, one.by_module and degrees
        if key not in self._chained:
            ops = [(link, op) for link in links for op in (ALL_REDUCE, REDUCE_SCATTER)]

            def of(bytes: float) -> float:
                given = bytes / degrees.dp / one.microbatches
                return min(link.overlap * link.collective(op, degrees.tp, given) for link, op in ops)

            self._chained[key] = self.search.chained_sums(one, of)
        return one.microbatches * self._chained[key] / degrees.stages

    def _row(self, one: Candidate) -> float:
        """Seconds of the group that ends last, by the rows of the schedule; 0 where values go over stages, or the schedule is not known."""
        placed = self._on_stages(one.staging)
        if one.schedule not in dict(SCHEDULES) or not placed.is_chain or not placed.trains:
            return 0.0
        took, is_whole = self._took(one), np.full(one.stages, one.schedule not in ("zb_h1", "zbv"))
        is_whole[0] = True  # nothing waits for what the first stage sends back
        backward = np.where(is_whole, took["rest"], took["sent"])
        behind = np.where(is_whole, took["back"], np.minimum(took["back"], took["early"]))
        times = Times(took["forward"], backward, behind, took["late"], self._messages(one, placed))
        last = np.zeros(one.degrees.stages)
        np.maximum.at(last, [*one.homes], ends_of(one.schedule, one.homes, one.microbatches, times))
        return float((last + self.updating.behind_tasks(one)).max())

    def _messages(self, one: Candidate, placed: Placed) -> Seconds:
        """By stage but the last one the seconds of a message at least, of one of the ranks of a layer that share it."""
        assert self.program is not None
        links, degrees, found = self.machine.links, one.degrees, np.zeros(one.stages)
        key = one.staging, degrees.dp * one.microbatches, degrees.tp
        if key not in self._sent:
            for stage, pair in enumerate(placed.crossing):
                largest = (max((self.program.bytes(name, key[1]) for name in names), default=0.0) for names in pair)
                bytes = min(largest) / degrees.tp
                found[stage] = min(max(link.send.least, link.send.in_shards(bytes)) for link in links)
            self._sent[key] = found
        return self._sent[key]

    def _undivided(self, one: Candidate, placed: Placed, took: Mapping[str, Seconds], hops: Seconds) -> float:
        """The same of a batch that is not divided: reductions begin once the first gradient of a stage is there."""
        count, updates = placed.count, self.updating.updates(one)
        reduced, gathered = np.array([self.updating.collectives(one, (stage,)) for stage in range(count)]).T
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
        key = self._key(one), one.staging, one.microbatches > 1
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
        key = one.staging, layers[0] if layers is not None else 0, one.microbatches > 1
        if key not in self._sets:
            placed = self._on_stages(one.staging)
            shared = self._shared_of(one)
            pairs = zip(placed.own, placed.forward, strict=True)
            sets: dict[str, Sequence[Mask]] = {"own": placed.own}
            if one.microbatches > 1:
                sets = {"forward": placed.forward, "rest": [own & ~nodes for own, nodes in pairs]}
            if placed.is_chain and one.microbatches > 1 and count > 1:
                late = zip(sets["rest"], placed.late, strict=True)
                sets |= {"back": placed.back, "early": placed.early, "late": placed.late}
                sets["sent"] = [nodes & ~behind for nodes, behind in late]
            if placed.is_chain and one.microbatches == 1:
                sets |= {"way": placed.way, "first": placed.first}
            self._sets[key] = {
                name: Sets(placed, shared, some, ~placed.of_weights if name in ("early", "sent") else None)
                for name, some in sets.items()
            }
        return self._sets[key]

    def _shared_of(self, one: Candidate) -> Shared | None:
        """The sums of layers of a candidate; None where they are not known, or there are none."""
        if (layers := self._layers_of(one)) is None:
            return None
        key = one.staging, layers[0]
        if key not in self._shared:
            self._shared[key] = Shared(self._on_stages(one.staging), layers[1])
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

    def _on_stages(self, staging: tuple[int, bool]) -> Placed:
        """The nodes by stages, of which a candidate says how many there are and whether a plan names them."""
        assert self.program is not None
        if staging not in self._placed:
            count = staging[0]
            stage_of = self.search.stage_of(count) if count > 1 else {}
            may_have = self.search.stages_of(*staging) if count > 1 else {}

            def stages(path: str) -> range:
                named = named_stage(stage_of, path)
                return may_have.get(path, range(0)) if named is None else range(named, named + 1)

            self._placed[staging] = Placed(self.program, count, stages)
        return self._placed[staging]

    @cached_property
    def _added(self) -> float:
        """Seconds in which a rank adds the gradients of all parameters to those of the microbatches before, at most."""
        kernel = self.machine.processor(CPU).kernel(FALLBACK)
        return sum(kernel(3.0 * _MOST_ITEM * elements) for elements, _ in self.updating.parameters)

    def quick(self, one: Candidate) -> float:
        """The same by the work alone."""
        degrees, shared = one.degrees, self.shared(one.degrees.ranks)
        if not self.symbol:
            return shared
        once, repeated = self._once_and_repeated(one)
        update = self.updating.all_stages(one) / degrees.stages
        turns = self.search.estimates.turns(degrees.ranks)
        sessions = one.microbatches * one.stages_each * self.machine.processor(CPU).session
        work = turns * (update + sessions + (once + one.microbatches * repeated) / degrees.stages)
        return max(shared, self._beside(degrees.ranks) + work)

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
        return one.degrees.dp * one.microbatches, one.degrees.tp, one.by_module and one.degrees

    def _seconds(self, one: Candidate) -> tuple[Seconds, Seconds]:
        """By node its seconds on a rank of a candidate at least, and at most."""
        assert self.program is not None
        key = self._key(one)
        if key not in self._costs:
            program, parts, tp = self.program, one.degrees.dp * one.microbatches, one.degrees.tp
            exact, least = program.seconds(parts, tp)
            paths = np.array(program.paths)
            if (layers := self._layers_of(one)) is not None:
                least = np.where(layers[1].is_whole, exact, least)
            elif tp > 1:
                least = np.where(np.isin(paths, [*self.search.whole(one)]), exact, least)
            if self.search.has_records(one):
                own, _ = program.seconds(parts * tp)
                least = np.where(np.isin(paths, [*self.search.with_records(one.degrees)]), own, least)
            self._costs[key] = least, exact
        return self._costs[key]
