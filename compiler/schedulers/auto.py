"""A schedule for any stage times, edges, homes and limits: many orders are tried, and the one with the shortest simulated time wins.

Orders of F and B come from the named schedules where these fit the homes, from a greedy run under the limits, and from building blocks. W
is put into each of them where a home would wait. The best of them are made faster by exchanges of neighbours. At equal times the schedule
with the smaller peaks wins, then the first. Where one is as near to `lower_bound` as the costs are precise, nothing more is tried. In the
end a stage's B and W become one task again where that costs nothing.

With equal stages this meets the closed forms of ZB-H1 and ZB-V; since 1F1B and GPipe are among the orders, it is never slower than these
where they keep to the limits, but for that precision.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import TOLERANCE, one_microbatch, peaks, within
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import Timing, precedence, simulate
from partc.compiler.schedule.stages import Stages
from partc.compiler.schedulers.bound import lower_bound
from partc.compiler.schedulers.building_block import blocks
from partc.compiler.schedulers.fill import fill
from partc.compiler.schedulers.greedy import Preference, greedy
from partc.compiler.schedulers.named import gpipe, interleaved, one_f_one_b, zb_h1, zbv
from partc.runtime.artifact.tasks.task import Kind, Task

_WORK = 400_000
"""Tasks that are put in order or simulated at most. Named orders, and greedy ones under the limit, are tried in any case."""
_IMPROVED, _EXCHANGES = 4, 30_000
"""How many of the best schedules are made faster by exchanges, and tasks that are simulated for each of them."""
_FILLS = ((1.0, False), (0.5, False), (1.0, True))


class LimitError(ValueError):
    """A home's limit does not hold what one microbatch keeps there."""


@dataclass(frozen=True)
class ChosenSchedule:
    """A schedule, its time, and a time below which none can be."""

    schedule: Schedule
    total: float
    bound: float


def auto(
    stages: Stages, microbatches: int, costs: Costs, limits: Sequence[float] | None = None, split: bool = True
) -> ChosenSchedule:
    """The fastest schedule that was found within `limits`, per home in the costs' unit. LimitError where not even one microbatch fits."""
    limits = list(limits) if limits is not None else [float("inf")] * stages.rows
    if not within(one_microbatch(stages, costs), limits):
        raise LimitError(f"one microbatch keeps {one_microbatch(stages, costs)}, and the limits are {limits}")
    bound = lower_bound(stages, microbatches, costs, limits, split)
    candidates: list[tuple[float, float, int, Schedule]] = []
    for schedule in _candidates(stages, microbatches, costs, limits, split):
        kept, known = peaks(schedule, costs), precedence(schedule)
        if not known.cycle and within(kept, limits):
            candidates.append((simulate(schedule, costs, known).total, sum(kept), len(candidates), schedule))
            if candidates[-1][0] <= bound * (1 + costs.precision):
                break
    scale = bound or 1.0
    candidates.sort(key=lambda one: (round(one[0] / scale, 9), *one[1:3]))
    best = candidates[0][-1]
    if candidates[0][0] > bound * (1 + costs.precision):
        better = [improve(one[-1], costs, limits, bound, _EXCHANGES) for one in candidates[:_IMPROVED]]
        best = min(better, key=lambda one: round(simulate(one, costs).total / scale, 9))
    rows = _joined(best, costs, limits, simulate(best, costs).total).rows
    schedule = Schedule("auto", stages, microbatches, rows)
    return ChosenSchedule(schedule, simulate(schedule, costs).total, bound)


def _candidates(
    stages: Stages, microbatches: int, costs: Costs, limits: Sequence[float], split: bool
) -> Iterator[Schedule]:
    """Schedules to compare, each once; some may be over the limits, or have rows that wait for each other."""
    seen = set()
    left = _WORK
    for sure, order in _orders(stages, microbatches, costs, limits, split):
        if left < 0 and not sure:
            return
        left -= (2 + 2 * len(_FILLS)) * sum(map(len, order.rows))
        fills = [fill(order, costs, limits, *how) for how in _FILLS] if split and any(stages.splittable) else []
        for schedule in (order, *fills):
            if schedule is not None and schedule.rows not in seen:
                seen.add(schedule.rows)
                yield schedule


def _orders(
    stages: Stages, microbatches: int, costs: Costs, limits: Sequence[float], split: bool
) -> Iterator[tuple[bool, Schedule]]:
    """Orders of F and B, perhaps with W, the most promising first; and whether it must be tried."""
    if stages.is_one_each:
        if split:
            yield True, zb_h1(stages, microbatches)
        yield True, one_f_one_b(stages, microbatches)
    if stages.turns > 1:
        yield True, interleaved(stages, microbatches)
    if stages.is_vee and split:
        yield True, zbv(stages, microbatches)
    yield True, gpipe(stages, microbatches)
    one = one_microbatch(stages, costs)
    for ahead in (float("inf"), stages.rows, stages.rows + 1, 2 * stages.rows, stages.rows / 2 + 1):
        tight = [min(limit, max(1.0, ahead) * saved) for limit, saved in zip(limits, one, strict=True)]
        for preference in Preference:
            yield ahead == float("inf"), greedy(stages, microbatches, costs, tight, preference)
    for schedule in blocks(stages, microbatches, costs, split):
        yield False, schedule


def _joined(schedule: Schedule, costs: Costs, limits: Sequence[float], total: float) -> Schedule:
    """The schedule with those stages whole whose W all stand right behind their B, if that is not slower."""
    for home, row in enumerate(schedule.rows):
        for s in schedule.stages.on[home]:
            weights = [k for k, task in enumerate(row) if task.stage == s and task.kind is Kind.WEIGHT]
            if not weights or any(row[k - 1] != row[k]._replace(kind=Kind.BACKWARD) for k in weights):
                continue
            whole = tuple(task for task in schedule.rows[home] if task.stage != s or task.kind is not Kind.WEIGHT)
            rows = (*schedule.rows[:home], whole, *schedule.rows[home + 1 :])
            joined = Schedule(schedule.name, schedule.stages, schedule.microbatches, rows)
            if simulate(joined, costs).total <= total * (1 + TOLERANCE) and within(peaks(joined, costs), limits):
                schedule = joined
    return schedule


_TABU = 12


def improve(schedule: Schedule, costs: Costs, limits: Sequence[float], bound: float, work: int) -> Schedule:
    """The fastest schedule within the limits that exchanges lead to, with at most `work` tasks simulated.

    Of two neighbours in a row that are both critical, the second comes first; no exchange of others can shorten a step (van Laarhoven and
    others 1992, on job shops). The best exchange is made, even if it does not help, and is not undone for a while (tabu search).
    """
    now, timing = schedule, simulate(schedule, costs)
    best, least = now, timing.total
    forbidden: deque[tuple[Task, Task]] = deque(maxlen=_TABU)
    size = max(1, sum(map(len, schedule.rows)))
    while work > 0 and least > bound * (1 + TOLERANCE):
        exchange: tuple[float, float, Schedule, Timing, tuple[Task, Task]] | None = None
        for first, second, other in _exchanged(now, timing):
            work -= size
            if work < 0:
                break
            kept, known = peaks(other, costs), precedence(other)
            if known.cycle or not within(kept, limits):
                continue
            times = simulate(other, costs, known)
            allowed = (second, first) not in forbidden or times.total < least * (1 - TOLERANCE)
            if allowed and (exchange is None or (times.total, sum(kept)) < exchange[:2]):
                exchange = times.total, sum(kept), other, times, (first, second)
        if exchange is None:
            break
        total, _, now, timing, pair = exchange
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
