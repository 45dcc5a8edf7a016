"""What a candidate of a search takes at least: the nodes of programs that are known, at the sizes of a rank of it.

    step       the longest of work, way, gradients and gathers, beside what any step takes
    work       microbatches * task / stages + update: the mean of all ranks, which the slowest is not below
    way        of a stage: `Task.longest` of what it computes, with its updates; of a schedule the mean of all stages, each from when
               the first microbatch can be there
    gradients  the shortest way of nodes to any gradient, then the reduction of a rank's over `dp`, of several stages in their mean
    gathers    of a sharded optimizer the AllGathers of its shards, behind all that is computed for gradients

The programs are that of one rank, and of candidates over `tp` that were played, of one stage and one microbatch: at another size of the
batch each is what a rank of another `dp` runs. A node that such a program has as one rank has it is sharded over no multiple of its `tp`
either, nor is one whose dims are in no set that is cut; of all others a rank has an even shard at least (`NodeCost.in_even_shards`). The
sums of a layer are on the way of a candidate of one stage whose modules are all sharded, as in the program that is known; between stages a
sum may go along with what crosses. What does not depend on the batch is counted once, of sessions one for each microbatch of a stage, and
no message or wait is, so no candidate is faster, by any schedule.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from partc.cli.simulation.actions import Pricing, least_of, updated
from partc.cli.simulation.known_program import Program, Task
from partc.cli.simulation.sizes import FileSizes
from partc.cli.simulation.step import Simulation
from partc.compiler.cost.machine import Link, Machine
from partc.compiler.cost.price import Operand
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.reductions import Calls, seconds_of
from partc.compiler.search.search import Search, named_stage
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, CPU, REDUCE_SCATTER
from partc.runtime.artifact.graph.row_function import ROWS
from partc.runtime.program.steps import Segment, Update
from partc.runtime.updates.updater import SHARD

if TYPE_CHECKING:
    from onnx import FunctionProto


class Least:
    """Seconds of candidates of a search on a machine, by the unsharded program `whole`; by its work alone where its batch has no symbol."""

    def __init__(self, search: Search, whole: Simulation, machine: Machine) -> None:
        self.search, self.machine, self.pricing = search, machine, Pricing(machine)
        (sizes,) = whole.files.values()
        self.update = sum(self.pricing.least(step, sizes) for step in sizes.file.steps if isinstance(step, Update))
        self.work = self.update + sum(
            self.pricing.least(step, sizes) for step in sizes.file.steps if isinstance(step, Segment)
        )
        self.reduced = sum(_reduced(step, sizes) for step in sizes.file.steps if isinstance(step, Update))
        updates = [step for step in sizes.file.steps if isinstance(step, Update)]
        self.updated = [pair for step in updates for pair in _updated(step, sizes)]
        buckets = search.estimates.reductions.calls((), 1, 1, False)
        is_same = sum(bytes * many for (_, bytes), many in buckets.items()) == self.reduced
        self.has_buckets = is_same and not search.request.base.is_sharded
        self.parameters = [one for step in updates for one in _parameters(step, sizes)]
        symbol = next(iter(search.batch.symbols), "")
        scales = search.records is not None and search.request.sizes.get(symbol) == search.records
        self.symbol = symbol if scales and not self.machine.segments else ""
        self._programs = {1: Program(sizes, self.pricing, self.symbol)} if self.symbol else {}
        self._tasks: dict[Hashable, Task] = {}
        self._ways: dict[Hashable, float] = {}
        self._updates: dict[Hashable, float] = {}
        self._by_reader: dict[int, dict[str, float]] = {}
        self._by_path: dict[tuple[int, int, bool], tuple[float, float]] = {}

    def learn(self, one: Candidate, simulation: Simulation) -> None:
        """Takes the program of a candidate over `tp` that was played."""
        degrees = one.degrees
        is_whole = degrees.stages == one.microbatches == 1 and not (one.by_module or one.recompute)
        if self.symbol and is_whole and degrees.tp > 1 and degrees.tp not in self._programs:
            sizes = min(
                simulation.files.values(),
                key=lambda some: sum(len(one.formal.nodes) for one in some.file.steps if isinstance(one, Segment)),
            )
            self._programs[degrees.tp] = Program(sizes, self.pricing, self.symbol, degrees, self._programs[1])

    def shared(self, ranks: int) -> float:
        """Seconds that no plan on so many ranks is below, whatever it shards."""
        cores = self.machine.cores * self.search.request.hosts
        return self._beside(ranks) + self.work / (min(ranks, cores) if cores else ranks)

    def _beside(self, ranks: int) -> float:
        """Seconds of any step: what it does beside its actions, and the agreement of all ranks before the first of them."""
        return self.machine.processor(CPU).step + self.machine.links[0].collective(ALL_REDUCE, ranks, 0)

    def __call__(self, one: Candidate) -> float:
        """Seconds that no step of a candidate is below."""
        if not self.symbol:
            return self.quick(one)
        program, parts, shards = self._of(one)
        sums = one.degrees.stages == 1 and not one.by_module
        key = parts, shards, program.tp, sums
        if key not in self._tasks:
            self._tasks[key] = program.task(parts, shards, sums)
        task = self._tasks[key]
        ways = key, one.homes, one.microbatches, one.zero, bool(one.schedule)
        if ways not in self._ways:
            updates, session = self._at_readers(one), self.machine.processor(CPU).session
            some = (task.longest(paths, one.microbatches, updates, session) for paths in self._placed(task, one))
            self._ways[ways] = max(*some, self._filled(one, task) if one.schedule else 0.0)
        beside = max(self._ways[ways], task.gradient + self._reduction(one), self._gathered(one))
        return max(self.quick(one), self._beside(one.degrees.ranks) + beside)

    def _placed(self, task: Task, one: Candidate) -> list[list[str]]:
        """By group of ranks the paths of a task that are in what a plan places there by name."""
        if one.stages == 1:
            return [list(task.by_path)]
        found: list[list[str]] = [[] for _ in range(one.degrees.stages)]
        stage_of = self.search.stage_of(one.stages)
        for path in task.by_path:
            if (stage := named_stage(stage_of, path)) is not None:
                found[one.homes[stage]].append(path)
        return found

    def _filled(self, one: Candidate, task: Task) -> float:
        """Seconds of a schedule in the mean of its groups: none computes before the first microbatch can be at one of its stages."""
        groups, homes = one.degrees.stages, one.homes
        may_have, stage_of = self.search.stages_of(one.stages), self.search.stage_of(one.stages)
        heads, work = [math.inf] * groups, 0.0
        for path, nodes in task.by_path.items():
            named = named_stage(stage_of, path)
            some = may_have.get(path, range(0)) if named is None else range(named, named + 1)
            work += sum(node.seconds for node in nodes) if some else 0.0
            for home in {homes[stage] for stage in some}:
                heads[home] = min(heads[home], *(node.head for node in nodes))
        if math.inf in heads:
            return 0.0
        sessions = (one.microbatches * one.stages_each - 1) * self.machine.processor(CPU).session
        return (sum(heads) + one.microbatches * work + self.updates(one)) / groups + sessions

    def quick(self, one: Candidate) -> float:
        """The same by the work alone."""
        degrees, shared = one.degrees, self.shared(one.degrees.ranks)
        if not self.symbol:
            return shared
        once, repeated = self._seconds(one)
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

    def _at_readers(self, one: Candidate) -> dict[str, float]:
        """By path the seconds of the updates of what is read there alone, which are of the stage that has the path."""
        shards = one.degrees.tp * (one.degrees.dp if one.zero else 1)
        if shards not in self._by_reader:
            each = self.update / max(1, sum(own for own, _ in self.parameters)) / shards
            found = self._by_reader[shards] = defaultdict[str, float](float)
            for elements, names in self.parameters:
                if len(readers := self._programs[1].readers(names)) == 1:
                    found[min(readers)] += each * elements
        return self._by_reader[shards]

    def computed(self, one: Candidate) -> float | None:
        """Seconds of a microbatch on a rank, of all stages; None where no program over as many ranks of `tp` is known."""
        if not self.symbol or self._of(one)[0].tp != one.degrees.tp:
            return None
        return sum(self._seconds(one))

    def _seconds(self, one: Candidate) -> tuple[float, float]:
        """Seconds of a microbatch in all stages, first those that do not depend on the batch."""
        program, parts, shards = self._of(one)
        if shards == 1 or program.tp > 1:
            return program.seconds(parts, shards)
        has_records = self.search.has_records(one)
        key = parts, shards, has_records
        if key not in self._by_path:
            paths = self.search.with_records(one.degrees) if has_records else self.search.whole(shards)
            self._by_path[key] = program.seconds_by_path(parts, shards, paths, parts * shards if has_records else parts)
        return self._by_path[key]

    def _of(self, one: Candidate) -> tuple[Program, int, int]:
        """The program that says most of a candidate, with the parts of the batch, and into how many what is sharded is sharded further."""
        tp = one.degrees.tp
        some = [1] if self.search.has_records(one) else [shards for shards in self._programs if tp % shards == 0]
        known = max(some)
        return self._programs[known], one.degrees.dp * one.microbatches, tp // known

    def _gathered(self, one: Candidate) -> float:
        """All that a rank of one stage computes for gradients, and behind it the AllGathers of a sharded optimizer; 0 of other ones."""
        if not one.zero or one.degrees.stages > 1 or (known := self._known_reductions(one)) is None:
            return 0.0
        calls = Counter({call: many for call, many in known.items() if call[0] == ALL_GATHER})
        once, repeated = self._seconds(one)
        computed = once + one.microbatches * (repeated + self.machine.processor(CPU).session)
        gathers = min(link.overlap * seconds_of(calls, link, one.degrees.dp) for link in self.machine.links)
        return self.search.estimates.turns(one.degrees.ranks) * computed + gathers

    def _known_reductions(self, one: Candidate) -> Calls | None:
        """The collectives for the gradients of one stage, which the compiler fills where it reduces all gradients of the model."""
        return self.search.reductions(one) if self.has_buckets and one.degrees.stages == 1 else None

    def _reduction(self, one: Candidate) -> float:
        """The reduction of a rank's gradients, as far as it goes on beside computations, over the fastest link.

        They are one behind another, where they are known; else as many bytes in however many.
        """
        degrees, links = one.degrees, self.machine.links
        if (known := self._known_reductions(one)) is not None:
            return min(link.overlap * seconds_of(known, link, degrees.dp) for link in links)
        given = self.reduced * self.search.own_share(one) / degrees.stages
        return min(link.overlap * _reduce(link, degrees.dp, given, one.zero) for link in links)


class Leasts:
    """What candidates take at least, each on the machine as its ranks find it, of whose host more or fewer of them work."""

    def __init__(self, search: Search, whole: Simulation) -> None:
        self.search, self.whole = search, whole
        self._learned: list[tuple[Candidate, Simulation]] = []
        self._of: dict[int, Least] = {}

    def on(self, ranks: int) -> Least:
        """For candidates on so many ranks."""
        request = self.search.request
        busy = request.machine.busy(ranks, request.hosts)
        if busy not in self._of:
            found = self._of[busy] = Least(self.search, self.whole, request.machine.among(busy))
            for pair in self._learned:
                found.learn(*pair)
        return self._of[busy]

    def learn(self, one: Candidate, simulation: Simulation) -> None:
        """Takes the program of a candidate over `tp` that was played."""
        self._learned.append((one, simulation))
        for found in self._of.values():
            found.learn(one, simulation)

    def quick(self, one: Candidate) -> float:
        """Seconds that no step of a candidate is below, by its work alone."""
        return self.on(one.degrees.ranks).quick(one)

    def __call__(self, one: Candidate) -> float:
        """Seconds that no step of a candidate is below."""
        return self.on(one.degrees.ranks)(one)

    def updating(self, ranks: int, share: float) -> float:
        """As `Least.updating`, on a rank of so many."""
        return self.on(ranks).updating(share)

    def computed(self, one: Candidate) -> float | None:
        """As `Least.computed`."""
        return self.on(one.degrees.ranks).computed(one)


def _reduced(update: Update, sizes: FileSizes) -> float:
    """The bytes of gradients that ranks of a batch reduce before an update; of rows none."""
    total = 0.0
    for _, operands in _updated(update, sizes):
        most = max(math.prod(one.sizes or ()) for one in operands)
        total += min(one.bytes for one in operands if math.prod(one.sizes or ()) == most)
    return total


def _updated(update: Update, sizes: FileSizes) -> Iterator[tuple[FunctionProto, list[Operand]]]:
    """The functions that update parameters, with their operands, those of all that are updated alike as one; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for name, operands in updated(update, functions, sizes):
        if ROWS not in functions[name].input:
            yield functions[name], operands


def _parameters(update: Update, sizes: FileSizes) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The elements of each parameter that is updated, and the values that are read then; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for node in update.nodes:
        if node.op_type in functions and ROWS not in functions[node.op_type].input:
            yield max(math.prod(sizes.operand(name).sizes or ()) for name in node.input), tuple(node.input)


def _reduce(link: Link, ranks: int, given: float, zero: bool) -> float:
    """Seconds of so many bytes in however many collectives, of a sharded optimizer those of the way that takes less."""
    whole = _least_of(link, ALL_REDUCE, ranks, given)
    if not zero:
        return whole
    return min(whole, _least_of(link, REDUCE_SCATTER, ranks, given) + _least_of(link, ALL_GATHER, ranks, given / ranks))


def _least_of(link: Link, op: str, ranks: int, given: float) -> float:
    """Seconds in however many collectives: the speed is greatest at a point of the curve, or at all of it."""
    curve = link.split.get(op, link.all_reduce)
    some = [*(amount for amount, _ in curve.points if amount < given), given]
    return given * min(link.collective(op, ranks, amount) / amount for amount in some) if given else 0.0
