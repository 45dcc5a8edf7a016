"""The candidates of a search that are compiled, and played as by `partc simulate`: the best by their estimates, and baselines.

First of all the model is compiled for one rank. No plan computes less than its nodes, forward, backward and update: at the amounts at which
the machine is fastest, and evenly on all ranks, they are the bound. What its backward pass takes against the estimate is what that of all
candidates takes.

A candidate that cannot be faster than what is found, by the bound of the ranks that it uses, is not played; nor is one of a large model
whose estimate is above what is found by more than any estimate was too high so far. How many are played does not depend on how fast
this process is, so that the same input gives the same plan; a limit of time ends the search before.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from partc.cli.simulation.actions import Pricing
from partc.cli.simulation.step import Simulation, simulated
from partc.compiler.cost.machine import Machine
from partc.compiler.emit.emit import emit
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.candidate import MOST_MICROBATCHES, Candidate
from partc.compiler.search.estimate import Estimate
from partc.compiler.search.search import Search
from partc.runtime.artifact.format import CPU, SourceRecord
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.errors import UsageError
from partc.runtime.garbage_collection import uncollected
from partc.runtime.program.steps import Segment, Update
from partc.runtime.units import seconds

_NODES, _FEWEST, _MOST = 4000, 2, 8
"""Candidates are played until they have so many nodes of the model together, but so many at least and at most."""
_OF_TRAINING = 2.5
"""How many nodes a training has for one of its model."""
_LARGE, _TASKS = 500, 64
"""The most tasks, microbatches of stages, of what is played of a candidate for a model of so many nodes."""
_ALIKE = 3
"""Candidates of the same degrees that are played before others."""
_WHOLE = Candidate(Degrees())
"""The unsharded model."""
_REFUSED = 3
"""Refused candidates of several microbatches behind which no others are tried, unless one was played."""


@dataclass(frozen=True)
class Play:
    """A candidate that was played: the seconds of a step, the bytes that its ranks give, and the peak memory of the largest."""

    candidate: Candidate
    estimate: Estimate
    seconds: float
    bytes: int
    peak: int
    with_head: Callable[[tuple[str, ...]], str]
    """Its plan with these lines at the head."""


@dataclass
class Plays:
    """What was played in order; what the compiler refused, with its reason; whether time was over before all were."""

    search: Search
    memory: int | None
    played: list[Play] = field(default_factory=list)
    refused: dict[Candidate, str] = field(default_factory=dict)
    cut_short: bool = False
    work: float = 0.0
    """Seconds that all ranks together take at least."""

    def bound(self, ranks: int) -> float:
        """Seconds that no plan on these ranks is below."""
        machine, hosts = self.search.request.machine, self.search.request.hosts
        working = min(ranks, machine.cores * hosts) if machine.cores else ranks
        return machine.processor(CPU).step + self.work / working

    @property
    def best(self) -> Play | None:
        """The fastest that is within the memory; of equals the one that was played first."""
        fits = [one for one in self.played if self.memory is None or one.peak <= self.memory]
        return min(fits, key=lambda one: one.seconds, default=None)

    @property
    def surplus(self) -> float:
        """The bytes by which peaks are above their estimates, in the median of what was played: sessions, inputs, code."""
        return median(one.peak - one.estimate.bytes for one in self.played) if self.played else 0.0

    @property
    def overestimate(self) -> float:
        """The largest share of an estimate by which it was above what was played; 0 where none was."""
        return max((0.0, *(1 - one.seconds / one.estimate.seconds for one in self.played)))

    def of(self, candidate: Candidate) -> Play | None:
        """What was played of a candidate."""
        return next((one for one in self.played if one.candidate == candidate), None)


@uncollected()
def played(search: Search, memory: int | None, began: float, limit: float | None) -> Plays:
    """Plays candidates; UsageError where the limit of time, in seconds since it `began`, is over before one is within the memory."""
    found = Plays(search, memory)
    nodes, longest = len(search.program.model.graph) * (_OF_TRAINING if search.request.base.trains else 1.0), 0.0
    most = max(_FEWEST, min(_MOST, int(_NODES / max(1.0, nodes))))
    for candidate in itertools.chain([_WHOLE], _in_turn(found, most)):
        begin = time.monotonic()
        if limit is not None and begin - began + longest > limit:
            found.cut_short = True
            break
        try:
            proposal = search.proposal(candidate)
        except CompileError as error:
            found.refused[candidate] = error.problems[0].fact
            continue
        step = play_program(search, proposal.done)
        if candidate == _WHOLE:
            found.work = least_work(step, search.request.machine)
            search.estimates.calibrate(step.played.busy[0])
        if candidate != _WHOLE or search.request.fixed.allows(candidate.degrees):
            peak = max(one.peak for one in step.memory.values())
            given = sum(len(one.ranks) * bytes for one, bytes in zip(step.played.classes, step.bytes, strict=True))
            found.played.append(
                Play(candidate, search.estimate(candidate), step.played.seconds, given, peak, proposal.with_head)
            )
        longest = max(longest, time.monotonic() - begin)
    if found.cut_short and found.best is None:
        fact = f"--time {seconds(limit or 0)}: is over before a plan is found"
        raise UsageError(
            f"{fact}\n  help: give it more, such as --time {2 * (time.monotonic() - began + longest) + 1:.0f}s"
        )
    return found


def play_program(search: Search, done: Complete) -> Simulation:
    """A step of a program, as it would be written."""
    request = search.request
    with tempfile.TemporaryDirectory(prefix="partc-plan-") as name:
        folder = Path(name) / "build"
        emit(done, folder, {"model": SourceRecord(name=search.name, sha256="0" * 64), "plan": None}, bare=True)
        return simulated(open_artifact(folder, trust=True), request.machine, request.sizes, request.hosts, alike=True)


def least_work(whole: Simulation, machine: Machine) -> float:
    """The seconds that ranks take together at least for the nodes of the unsharded model, however these are sharded."""
    (sizes,), pricing, known = whole.files.values(), Pricing(machine), dict[int, float]()
    total = 0.0
    for step in sizes.file.steps:
        if isinstance(step, Segment | Update):
            key = id(step.formal if isinstance(step, Segment) else step)
            if key not in known:
                known[key] = pricing.least(step, sizes)
            total += known[key]
    return total


def _in_turn(found: Plays, most: int) -> Iterator[Candidate]:
    """The candidates to play, by their estimates, a few of each degrees, then baselines that are not far behind what was found."""
    search, tried, turns = found.search, {_WHOLE}, Counter[Degrees]()
    is_large = len(search.program.model.graph) > _LARGE
    tasks = _TASKS if is_large else MOST_MICROBATCHES * search.request.ranks
    few = [one for one in search.candidates if one.microbatches * one.degrees.stages <= tasks and one not in tried]
    begun = len(found.played)
    waiting = {one: search.estimate(one) for one in few}

    def is_behind(one: Candidate, estimate: Estimate) -> bool:
        """Whether it cannot be faster than what was found: by the bound of its ranks; for a large model by its estimate, too."""
        least = found.bound(one.degrees.ranks)
        if is_large:
            least = max(least, estimate.seconds * (1 - found.overestimate))
        return found.best is not None and least >= found.best.seconds

    def rank(pair: tuple[Candidate, Estimate], surplus: float) -> tuple[bool, bool, float, float]:
        one, estimate = pair
        bytes = estimate.bytes + surplus
        over = found.memory is not None and bytes > found.memory
        return over, turns[one.degrees] >= _ALIKE and not over, bytes if over else estimate.seconds, bytes

    while len(found.played) - begun < (most if found.best is not None else 2 * most):
        waiting = {one: estimate for one, estimate in waiting.items() if not is_behind(one, estimate)}
        if not waiting:
            break
        candidate = min(waiting.items(), key=partial(rank, surplus=found.surplus))[0]
        del waiting[candidate]
        if not _is_refused(found, candidate):
            tried.add(candidate)
            turns[candidate.degrees] += 1
            yield candidate
    near = [(search.estimate(one), one) for one in search.baselines.values() if one not in tried]
    for estimate, candidate in sorted(near, key=lambda pair: pair[0].seconds):
        if is_behind(candidate, estimate):
            continue
        if not _is_refused(found, candidate):
            yield candidate
        one = replace(candidate, microbatches=1, schedule="")
        if candidate.microbatches > 1 and found.of(candidate) is None and found.of(one) is None:
            yield one


def _is_refused(found: Plays, candidate: Candidate) -> bool:
    """Whether the model is known not to run by microbatches: several such candidates were refused, and none was played."""
    played = any(one.candidate.microbatches > 1 for one in found.played)
    return candidate.microbatches > 1 and not played and sum(one.microbatches > 1 for one in found.refused) >= _REFUSED
