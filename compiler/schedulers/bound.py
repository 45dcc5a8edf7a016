"""A lower bound of the time of any schedule for some stages, costs and limits.

Ways of one microbatch, the longest along the edges: `before[s]` up to the begin of sF, `around[s]` from the end of sF to the begin of sB,
`after[s]` from the end of sB to the end of the step, `ahead[s]` from the end of sF to the end of the step. Every home is one machine. Its
tasks have a time before which they cannot begin and one that must follow, and no order of them, not even with interruptions, is faster than
to run always the one with most to follow (Jackson's rule).

A limit adds a law of areas: a microbatch is kept at least from sF over `around[s]` to the end of sB, and all of them need

    m * (saved time of one microbatch) <= limit * time of the home
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import TOLERANCE
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


@dataclass(frozen=True)
class Ways:
    """Per stage the least times of its tasks, and of the ways of a microbatch before, around and after it."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    before: tuple[float, ...]
    around: tuple[float, ...]
    after: tuple[float, ...]
    ahead: tuple[float, ...]


def ways(stages: Stages, microbatches: int, costs: Costs, split: Sequence[bool]) -> Ways:
    """The ways of one microbatch; `split[s]`: whether W may be apart from B, which then is ready sooner."""
    every = range(len(stages))
    some = range(microbatches if costs.measured else 1)
    least = [
        [min(times) for times in zip(*(_times(stages, s, i, costs, split[s]) for i in some), strict=True)]
        for s in every
    ]
    forward, backward = [times[0] for times in least], [times[1] for times in least]
    before, around, after = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    for s in every:
        for a in stages.sources[s]:
            before[s] = max(before[s], before[a] + forward[a] + costs.travel(stages, s, a))
    for s in reversed(every):
        for t in stages.gradient_targets[s]:
            hop = costs.travel(stages, s, t)
            around[s] = max(around[s], hop + forward[t] + around[t] + backward[t] + hop)
    for s in every:
        for t in stages.gradient_targets[s]:
            after[t] = max(after[t], costs.travel(stages, s, t) + backward[s] + after[s])
    ahead = [around[s] + backward[s] + after[s] for s in every]
    for t in reversed(every):
        for s in stages.sources[t]:
            ahead[s] = max(ahead[s], costs.travel(stages, s, t) + forward[t] + ahead[t])
    return Ways(*map(tuple, (forward, backward, before, around, after, ahead)))


def lower_bound(
    stages: Stages, microbatches: int, costs: Costs, limits: Sequence[float] | None = None, split: bool = True
) -> float:
    """A time that no valid schedule is below; `limits`: per home; `split`: whether B and W may be apart."""
    apart = [split and splittable for splittable in stages.splittable]
    way = ways(stages, microbatches, costs, apart)
    best = max(way.before[s] + way.forward[s] + way.ahead[s] for s in range(len(stages)))
    for home in range(stages.rows):
        best = max(best, _one_machine(list(_jobs(home, stages, microbatches, costs, way, apart))))
        if limits is not None:
            best = max(best, _area(home, stages, microbatches, costs, way, apart, limits[home]))
    return best


def _times(stages: Stages, s: int, i: int, costs: Costs, apart: bool) -> tuple[float, float, float]:
    """The least times of F, of B, and of what is left of the backward pass after B, whether it is split or not."""
    forward = costs.time(Task(s, Kind.FORWARD, i), False)
    if not stages.backward[s]:
        return forward, 0.0, 0.0
    backward = Task(s, Kind.BACKWARD, i)
    whole = costs.time(backward, False)
    if not apart:
        return forward, whole, 0.0
    soon = costs.time(backward, True)
    both = min(whole, soon + costs.time(Task(s, Kind.WEIGHT, i), True))
    return forward, min(soon, whole), both - min(soon, whole)


def _jobs(
    home: int, stages: Stages, microbatches: int, costs: Costs, way: Ways, apart: Sequence[bool]
) -> Iterator[tuple[float, float, float]]:
    """The tasks of each stage and kind on a home: their earliest begin, their total time, and what must follow each."""
    for s in stages.on[home]:
        if costs.measured:
            each = [_times(stages, s, i, costs, apart[s]) for i in range(microbatches)]
            forward, backward, weight = (sum(times) for times in zip(*each, strict=True))
        else:
            forward, backward, weight = (microbatches * time for time in _times(stages, s, 0, costs, apart[s]))
        begin = way.before[s]
        yield begin, forward, way.ahead[s]
        begin += way.forward[s] + way.around[s]
        yield begin, backward, way.after[s]
        yield begin + way.backward[s], weight, 0.0


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """The least time in which one machine does jobs of (begin, time, what follows), which may be interrupted."""
    waiting: list[tuple[float, float]] = []
    now, best, coming = 0.0, 0.0, sorted(jobs)
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, time, follows = coming.pop(0)
            heapq.heappush(waiting, (-follows, time))
        follows, left = heapq.heappop(waiting)
        until = min(now + left, coming[0][0]) if coming else now + left
        left -= until - now
        now = until
        if left > TOLERANCE * now and coming:
            heapq.heappush(waiting, (follows, left))
        else:
            best = max(best, now - follows)
    return best


def _area(
    home: int, stages: Stages, microbatches: int, costs: Costs, way: Ways, apart: Sequence[bool], limit: float
) -> float:
    """The time that a home needs for what is saved, at most `limit` of it at a time."""
    own = [s for s in stages.on[home] if stages.backward[s]]
    areas = {s: _least_saved(s, costs, way, apart[s]) for s in own}
    if not own or limit <= 0:
        return 0.0
    begin = min(way.before[s] for s in own)
    end = min(0.0 if apart[s] else way.after[s] for s in own)
    needed = microbatches * sum(areas.values()) / limit
    if len(own) == 1:
        saved = costs.stages[own[0]].saved
        slots = int(min(microbatches, limit / saved * (1 + TOLERANCE) if saved > 0 else microbatches))
        span = way.forward[own[0]] + way.around[own[0]] + way.backward[own[0]]
        needed = max(needed, math.ceil(microbatches / max(1, slots)) * span)
    return begin + needed + end


def _least_saved(s: int, costs: Costs, way: Ways, apart: bool) -> float:
    """The least saved amount times time of one microbatch in a stage."""
    cost = costs.stages[s]
    until = way.forward[s] + way.around[s]
    whole = cost.saved * (until + cost.full_backward)
    if not apart or costs.measured:
        return cost.saved * (until + way.backward[s])
    return min(whole, cost.saved * (until + cost.backward) + cost.saved_for_weight * cost.weight)
