"""What follows gradients at least: the collectives over `dp` for them, updates, and the collectives for what was updated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from partc.cli.simulation.actions import Pricing, least_of, updated
from partc.cli.simulation.known_program import Seconds
from partc.cli.simulation.node_sets import Placed
from partc.cli.simulation.sizes import FileSizes
from partc.compiler.cost.price import Operand
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.reductions import least_seconds, seconds_of
from partc.compiler.search.search import Search
from partc.runtime.artifact.format import ALL_GATHER, CPU
from partc.runtime.artifact.graph.row_function import ROWS
from partc.runtime.program.steps import Update
from partc.runtime.updates.updater import SHARD

if TYPE_CHECKING:
    from onnx import FunctionProto


class Updating:
    """What follows gradients, by the unsharded program `sizes`; `on_stages`: the nodes of its stages, by how many there are and whether a
    plan names them."""

    def __init__(
        self,
        search: Search,
        pricing: Pricing,
        sizes: FileSizes,
        on_stages: Callable[[tuple[int, bool]], Placed],
    ) -> None:
        self.search, self.pricing, self.machine, self.on_stages = search, pricing, pricing.machine, on_stages
        updates = [step for step in sizes.file.steps if isinstance(step, Update)]
        self.seconds = sum(pricing.least(step, sizes) for step in updates)
        """What an update of all parameters takes."""
        self.reduced = sum(_reduced(step, sizes) for step in updates)
        self.functions = [pair for step in updates for pair in _functions_of(step, sizes)]
        self.parameters = [one for step in updates for one in _parameters_of(step, sizes)]
        buckets = search.estimates.reductions.calls((), 1, 1, False)
        is_same = sum(bytes * many for (_, bytes), many in buckets.items()) == self.reduced
        self.has_buckets = is_same and not search.request.base.is_sharded
        self._of_shards: dict[Hashable, float] = {}
        self._played: dict[float, float] = {}
        self._read_on: dict[tuple[int, bool], list[int | None]] = {}
        self._updates: dict[Hashable, Seconds] = {}
        self._calls: dict[Hashable, tuple[float, float]] = {}
        self._names: dict[tuple[int, bool], list[frozenset[str]]] = {}
        self._behind: dict[Hashable, Seconds] = {}

    def all_stages(self, one: Candidate) -> float:
        """Seconds of the updates of all stages on one rank of each; of ZeRO a shard of each parameter, side by side as all of them."""
        if not one.zero:
            return self.seconds * self.search.own_share(one)
        shards = one.degrees.dp / self.search.own_share(one)
        return sum(self._of_shard(*pair, shards) for pair in self.functions)

    def _of_shard(self, function: FunctionProto, operands: Sequence[Operand], shards: float) -> float:
        """Seconds of the update of one of so many shards."""
        given = tuple(Operand((max(1, int(math.prod(one.sizes or ()) / shards)),), one.item) for one in operands)
        key = function.name, given
        if key not in self._of_shards:
            self._of_shards[key] = least_of(function, given, self.machine.processor(CPU))
        return self._of_shards[key]

    def played(self, share: float) -> float:
        """Seconds of the update of a share of all parameters on a rank, as it is played."""
        if share not in self._played:
            total, processor = 0.0, self.machine.processor(CPU)
            for function, operands in self.functions:
                sizes = (math.prod(one.sizes or ()) for one in operands)
                given = tuple(
                    one if many == 1 else Operand((max(2, round(share * many)),), one.item)
                    for one, many in zip(operands, sizes, strict=True)
                )
                total += self.pricing.function(function, given, processor, SHARD)
            self._played[share] = total
        return self._played[share]

    def updates(self, one: Candidate) -> Seconds:
        """By stage the seconds of the updates of what is read there alone."""
        degrees = one.degrees
        key = degrees.tp, degrees.dp if one.zero else 1, one.by_module and degrees, one.staging
        if key not in self._updates:
            each = self.seconds / max(1, sum(own for own, _ in self.parameters)) / key[1]
            found, cut = np.zeros(one.stages), self.search.sharded_names(one)
            for (elements, names), stage in zip(self.parameters, self._stages(one.staging), strict=True):
                if stage is not None:
                    found[stage] += each * elements / (1 if cut.isdisjoint(names) else degrees.tp)
            self._updates[key] = found
        return self._updates[key]

    def behind_tasks(self, one: Candidate) -> Seconds:
        """By group of stages what is behind the last of several microbatches: the collectives for its gradients, and updates."""
        key = one.degrees, one.homes, one.staging, one.zero, one.by_module
        if key not in self._behind:
            updates, groups = np.zeros(one.degrees.stages), range(one.degrees.stages)
            np.add.at(updates, [*one.homes], self.updates(one))
            some = [tuple(stage for stage, home in enumerate(one.homes) if home == group) for group in groups]
            self._behind[key] = np.maximum(updates, [self.collectives(one, own)[0] for own in some])
        return self._behind[key]

    def collectives(self, one: Candidate, stages: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of the collectives for the gradients of what is read on these stages alone, and of those for what is updated there."""
        degrees = one.degrees
        if degrees.dp == 1 or not self.has_buckets:
            return 0.0, 0.0
        key = degrees, one.staging, stages, one.zero, one.by_module
        if key not in self._calls:
            of_stage = self._parameters_on(one.staging)
            calls = self.search.reductions(one, frozenset().union(*(of_stage[stage] for stage in stages)))
            gathers = Counter({call: many for call, many in calls.items() if call[0] == ALL_GATHER})
            links = self.machine.links
            both, last = (
                min(link.overlap * seconds_of(some, link, degrees.dp) for link in links) for some in (calls, gathers)
            )
            self._calls[key] = both, last
        return self._calls[key]

    def reduction(self, one: Candidate) -> float:
        """The reduction of a rank's gradients, in the mean of stages as many bytes in however many collectives over the fastest link."""
        degrees, links = one.degrees, self.machine.links
        given = self.reduced * self.search.own_share(one) / degrees.stages
        return min(link.overlap * least_seconds(link, degrees.dp, given, one.zero) for link in links)

    def _parameters_on(self, staging: tuple[int, bool]) -> list[frozenset[str]]:
        """By stage the names of the parameters that are read there alone."""
        if staging not in self._names:
            found: list[set[str]] = [set() for _ in range(staging[0])]
            for (_, names), stage in zip(self.parameters, self._stages(staging), strict=True):
                if stage is not None:
                    found[stage].update(names)
            self._names[staging] = [frozenset(some) for some in found]
        return self._names[staging]

    def _stages(self, staging: tuple[int, bool]) -> list[int | None]:
        """By parameter the stage on which all readers of its values are."""
        if staging not in self._read_on:
            placed, found = self.on_stages(staging), list[int | None]()
            stage_of, readers = placed.stage.tolist(), placed.program.readers
            for _, names in self.parameters:
                stages = {stage_of[at] for name in names for at in readers.get(name, ())}
                found.append(stages.pop() if len(stages) == 1 and -1 not in stages else None)
            self._read_on[staging] = found
        return self._read_on[staging]


def _reduced(update: Update, sizes: FileSizes) -> float:
    """The bytes of gradients that ranks of a batch reduce before an update; of rows none."""
    total = 0.0
    for _, operands in _functions_of(update, sizes):
        most = max(math.prod(one.sizes or ()) for one in operands)
        total += min(one.bytes for one in operands if math.prod(one.sizes or ()) == most)
    return total


def _functions_of(update: Update, sizes: FileSizes) -> Iterator[tuple[FunctionProto, list[Operand]]]:
    """The functions that update parameters, with their operands, those of all that are updated alike as one; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for name, operands in updated(update, functions, sizes):
        if ROWS not in functions[name].input:
            yield functions[name], operands


def _parameters_of(update: Update, sizes: FileSizes) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The elements of each parameter that is updated, and the values that are read then; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for node in update.nodes:
        if node.op_type in functions and ROWS not in functions[node.op_type].input:
            yield max(math.prod(sizes.operand(name).sizes or ()) for name in node.input), tuple(node.input)
