"""The candidates of a search that are compiled and simulated, as by `partc simulate`: those with the best estimates, and baselines.

First of all the model is compiled for one rank: how long it computes is what estimates begin with. Of a large model a
candidate is not simulated whose estimate is above what was found, as far as the estimates of what was simulated, of the same degrees or
else of the same kind, were off. How many are simulated does not depend on how fast this process is, so that the same input gives the same
plan; a limit of time ends the search before, and more are simulated in it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from partc.compiler.cost.step import Simulation, simulated
from partc.compiler.emit.emit import Unwritten
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.candidate import MOST_MICROBATCHES, Candidate
from partc.compiler.search.estimate import Estimate
from partc.compiler.search.search import Search
from partc.runtime.errors import UsageError
from partc.runtime.garbage_collection import uncollected
from partc.runtime.units import seconds

_NODES, _FEWEST, _MOST = 4000, 2, 8
"""Candidates are played until they have so many nodes of the model together, but so many at least and at most."""
_OF_TRAINING = 2.5
"""The number of nodes of a training for each node of its model."""
_LARGE, _TASKS = 500, 256
"""The most tasks, microbatches of stages, of what is played of a candidate for a model of so many nodes."""
_ERROR = 0.05
"""The share by which an estimate may be too high compared with candidates of other degrees."""
_ALIKE = 3
"""Candidates of the same degrees that are played before others."""
_WHOLE = Candidate(Degrees())
"""The unsharded model."""
_REFUSED = 3
"""Refused candidates of several microbatches behind which no others are tried, unless one was played."""


@dataclass(frozen=True)
class SimulatedPlan:
    """A candidate that was played: the seconds of a step, the bytes that its ranks give, and the peak memory of the largest."""

    candidate: Candidate
    estimate: Estimate
    seconds: float
    bytes: int
    peak: int
    with_head: Callable[[tuple[str, ...]], str]
    """Its plan with these lines at the head."""


@dataclass
class SearchState:
    """What was played in order; what the compiler refused, with its reason; whether time was over before all were.

    `wanted`: how many are to be found, more than one where the fastest are run; `measured`: the seconds of those; `failed`: why others
    did not run.
    """

    search: Search
    memory: int | None
    wanted: int = 1
    played: list[SimulatedPlan] = field(default_factory=list)
    refused: dict[Candidate, str] = field(default_factory=dict)
    cut_short: bool = False
    measured: dict[Candidate, float] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)

    @property
    def best(self) -> SimulatedPlan | None:
        """The fastest that is within the memory: of those that were run, if any was."""
        ran = [one for one in self.fitting if one.candidate in self.measured]
        return min(ran or self.fitting, key=lambda one: self.measured.get(one.candidate, one.seconds), default=None)

    @property
    def fitting(self) -> list[SimulatedPlan]:
        """The simulated candidates that fit in the memory, fastest first; of equals, the one simulated first."""
        fits = [one for one in self.played if self.memory is None or one.peak <= self.memory]
        return sorted(fits, key=lambda one: one.seconds)

    @property
    def enough(self) -> float:
        """The seconds below which a candidate is one of the fastest that are wanted."""
        fitting = self.fitting
        return fitting[self.wanted - 1].seconds if len(fitting) >= self.wanted else math.inf

    @property
    def surplus(self) -> float:
        """The bytes by which peaks are above their estimates, in the median of what was played: sessions, inputs, code."""
        return median(one.peak - one.estimate.bytes for one in self.played) if self.played else 0.0

    @property
    def ratios(self) -> list[tuple[Candidate, float]]:
        """The simulated candidates, each with the ratio of its simulated to its estimated seconds."""
        return [(one.candidate, one.seconds / self.search.estimate(one.candidate).seconds) for one in self.played]

    def likely(self, candidate: Candidate, estimate: Estimate, rows: Sequence[tuple[Candidate, float]]) -> float:
        """The seconds that a candidate hardly takes less than, by its estimate and by `rows`, how far those of what was played were off.

        Estimates of candidates of the same degrees err alike that are all of one microbatch, or all of several.
        """

        def kind(one: Candidate) -> tuple[bool, bool, bool, bool]:
            return one.microbatches > 1, one.zero, one.stored, one.degrees.tp * one.degrees.stages > 1

        alike = [(other, ratio) for other, ratio in rows if kind(other) == kind(candidate)]
        if same := [ratio for other, ratio in alike if other.degrees == candidate.degrees]:
            return estimate.seconds * min(same)
        return (
            estimate.seconds * min([ratio for _, ratio in alike] or [1.0, *(ratio for _, ratio in rows)]) * (1 - _ERROR)
        )

    def of(self, candidate: Candidate) -> SimulatedPlan | None:
        """Returns the simulation of a candidate."""
        return next((one for one in self.played if one.candidate == candidate), None)


@uncollected()
def played(search: Search, memory: int | None, began: float, limit: float | None, wanted: int = 1) -> SearchState:
    """Plays candidates, to find so many; UsageError where the limit of time, in seconds since it `began`, is over before one is found."""
    state = SearchState(search, memory, wanted)
    nodes, longest = len(search.program.model.graph) * (_OF_TRAINING if search.request.base.trains else 1.0), 0.0
    most = max(_FEWEST, wanted, min(_MOST, int(_NODES / max(1.0, nodes)))) if limit is None else max(_MOST, wanted)
    for candidate in itertools.chain([_WHOLE], _in_turn(state, most)):
        begin = time.monotonic()
        if limit is not None and begin - began + longest > limit:
            state.cut_short = True
            break
        try:
            proposal = search.proposal(candidate)
        except CompileError as error:
            state.refused[candidate] = error.problems[0].fact
            continue
        step = play_program(search, proposal.done)
        if candidate == _WHOLE:
            search.estimates.calibrate(step.played.busy[0])
        if candidate != _WHOLE or search.request.fixed.allows(candidate.degrees):
            peak = max(one.peak for one in step.memory.values())
            given = sum(len(one.ranks) * bytes for one, bytes in zip(step.played.classes, step.bytes, strict=True))
            state.played.append(
                SimulatedPlan(
                    candidate, search.estimate(candidate), step.played.seconds, given, peak, proposal.with_head
                )
            )
        longest = max(longest, time.monotonic() - begin)
    if state.cut_short and state.best is None:
        fact = f"--time {seconds(limit or 0)}: is over before a plan is found"
        raise UsageError(
            f"{fact}\n  help: give it more, such as --time {2 * (time.monotonic() - began + longest) + 1:.0f}s"
        )
    return state


def play_program(search: Search, done: Complete) -> Simulation:
    """A step of a program, as it would be written."""
    request = search.request
    return simulated(Unwritten([done], search.name), request.machine, request.sizes, request.hosts, alike=True)


def _in_turn(state: SearchState, most: int) -> Iterator[Candidate]:
    """The candidates to play, by what is expected of them, a few of each degrees, then baselines that are not far behind what was found."""
    search, tried, turns = state.search, {_WHOLE}, Counter[Degrees]()
    is_large = len(search.program.model.graph) > _LARGE
    tasks = _TASKS if is_large else MOST_MICROBATCHES * search.request.ranks
    few = [one for one in search.candidates if one.microbatches * one.stages <= tasks and one not in tried]
    begun = len(state.played)
    waiting = {one: search.estimate(one) for one in few}

    def is_behind(one: Candidate, estimate: Estimate) -> bool:
        """Whether a candidate of a large model is slower than what was found, by its estimate and the error of others."""
        return is_large and state.best is not None and state.likely(one, estimate, state.ratios) >= state.enough

    def rank(one: Candidate, estimate: Estimate, surplus: float) -> tuple[bool, bool, float, float]:
        bytes = estimate.bytes + surplus
        over = state.memory is not None and bytes > state.memory
        return over, turns[one.degrees] >= _ALIKE and not over, bytes if over else estimate.seconds, bytes

    def following() -> Candidate | None:
        """The next one to simulate; those before it are behind what was found, and wait no more."""
        surplus, rows = state.surplus, state.ratios

        def likely(one: Candidate, estimate: Estimate) -> Estimate:
            return replace(estimate, seconds=state.likely(one, estimate, rows)) if is_large else estimate

        for one in sorted(waiting, key=lambda one: rank(one, likely(one, waiting[one]), surplus)):
            estimate = waiting.pop(one)
            if not is_behind(one, estimate) and not _is_refused(state, one):
                return one
        return None

    while len(state.played) - begun < (most if state.best is not None else 2 * most):
        candidate = following()
        if candidate is None:
            break
        tried.add(candidate)
        turns[candidate.degrees] += 1
        yield candidate
    near = [(search.estimate(one), one) for one in search.baselines.values() if one not in tried]
    for estimate, candidate in sorted(near, key=lambda pair: pair[0].seconds):
        if is_behind(candidate, estimate):
            continue
        if not _is_refused(state, candidate):
            yield candidate
        one = replace(candidate, microbatches=1, schedule="")
        if candidate.microbatches > 1 and state.of(candidate) is None and state.of(one) is None:
            yield one


def _is_refused(found: SearchState, candidate: Candidate) -> bool:
    """Whether the model is known not to run by microbatches: several such candidates were refused, and none was played."""
    played = any(one.candidate.microbatches > 1 for one in found.played)
    return candidate.microbatches > 1 and not played and sum(one.microbatches > 1 for one in found.refused) >= _REFUSED
