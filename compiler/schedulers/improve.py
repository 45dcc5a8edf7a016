"""A schedule made faster by exchanges: of two neighbours in a row that are both critical, the second comes first.

A step is as long as its critical tasks, so no exchange of others can shorten it (van Laarhoven, Aarts and Lenstra 1992, on job shops).
The best exchange is made, even if it does not help, and is not undone for a while (tabu search); the best schedule that was seen is kept.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import TOLERANCE, peaks, within
from partc.compiler.schedule.precedence import precedence
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import Timing, simulate
from partc.runtime.artifact.tasks.task import Task

_TABU = 12


def improve(schedule: Schedule, costs: Costs, limits: Sequence[float], bound: float, work: int) -> Schedule:
    """The fastest schedule within the limits that exchanges lead to, with at most `work` tasks simulated."""
    now, timing = schedule, simulate(schedule, costs)
    best, least = now, timing.total
    forbidden: deque[tuple[Task, Task]] = deque(maxlen=_TABU)
    size = max(1, sum(map(len, schedule.rows)))
    while work > 0 and least > bound * (1 + TOLERANCE):
        found: tuple[float, float, Schedule, Timing, tuple[Task, Task]] | None = None
        for first, second, other in _exchanged(now, timing):
            work -= size
            if work < 0:
                break
            kept, known = peaks(other, costs), precedence(other)
            if known.cycle or not within(kept, limits):
                continue
            times = simulate(other, costs, known)
            allowed = (second, first) not in forbidden or times.total < least * (1 - TOLERANCE)
            if allowed and (found is None or (times.total, sum(kept)) < found[:2]):
                found = times.total, sum(kept), other, times, (first, second)
        if found is None:
            break
        total, _, now, timing, pair = found
        forbidden.append(pair)
        if total < least * (1 - TOLERANCE):
            best, least = now, total
    return best


def _exchanged(schedule: Schedule, timing: Timing) -> Iterator[tuple[Task, Task, Schedule]]:
    """The exchanges of critical neighbours that do not wait for each other, with the schedule after each."""
    stages = schedule.stages
    critical = list(timing.critical)
    for first, second in itertools.pairwise(critical):
        if stages.stage_ranks[first.stage] != stages.stage_ranks[second.stage] or first in stages.needs(second):
            continue
        rows = list(schedule.rows)
        for home in stages.stage_ranks[first.stage]:
            row = list(rows[home])
            k = row.index(first)
            if row[k + 1] != second:
                break
            row[k], row[k + 1] = second, first
            rows[home] = tuple(row)
        else:
            yield first, second, Schedule(schedule.name, stages, schedule.microbatches, tuple(rows))
