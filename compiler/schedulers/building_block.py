"""Periodic orders: one microbatch is placed in time, and each following one is the same, one period later (Qi et al. 2024, arXiv
2405.15362).

The tasks of one microbatch are placed so that no two tasks of a home meet modulo the period. Rows then repeat, and what a home keeps
follows from how long the block keeps what a stage has saved; gaps before the next stage trade time against memory. The paper has equal
tasks; here times, edges and homes are any. Rows are run as soon as they can, which closes the begin and the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import TOLERANCE
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task

_STRETCHES = (1.0, 1.1, 1.25, 1.5)


def blocks(stages: Stages, microbatches: int, costs: Costs, split: bool) -> Iterator[Schedule]:
    """Schedules of blocks with gaps of none to a few of the shortest tasks; per set of gaps the shortest period that has room."""
    work = [0.0] * stages.rows
    for home, own in enumerate(stages.on):
        work[home] = sum(time for s in own for _, time in _kinds(stages, s, costs, split))
    several = any(len(own) > 1 for own in stages.on)
    steps = (0, 1, 2, 3) if several else (0, 1, 2)
    shortest = min(
        (time for s in range(len(stages)) for _, time in _kinds(stages, s, costs, split) if time > 0), default=0.0
    )
    sizes = itertools.product(steps, repeat=4) if several else ((a, a, b, b) for a in steps for b in steps)
    seen = set()
    for gaps in sorted(sizes, key=sum):
        for stretch in _STRETCHES:
            begins = _block(stages, costs, max(work) * stretch, [gap * shortest for gap in gaps], split)
            if begins is None:
                continue
            schedule = _repeated(stages, microbatches, begins, max(work) * stretch)
            if schedule.rows not in seen:
                seen.add(schedule.rows)
                yield schedule
            break


def _kinds(stages: Stages, s: int, costs: Costs, split: bool) -> list[tuple[Kind, float]]:
    """The kinds of a stage's tasks, with the time of each."""
    apart = split and stages.splittable[s] and len(stages.stage_ranks[s]) == 1
    kinds = [Kind.FORWARD, *([Kind.BACKWARD] if stages.backward[s] else []), *([Kind.WEIGHT] if apart else [])]
    return [(kind, costs.time(Task(s, kind, 0), apart)) for kind in kinds]


class _Period:
    """The times of a home's period that are taken."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.taken: list[tuple[float, float]] = []

    def next_clear(self, ready: float, length: float) -> float | None:
        """The first begin from `ready` on at which a task meets no other, in any repetition."""
        for late in sorted({0.0, *((end - ready) % self.period for _, end in self.taken)}):
            if all(self._clear(ready + late, length, begin, end) for begin, end in self.taken):
                return ready + late
        return None

    def _clear(self, at: float, length: float, begin: float, end: float) -> bool:
        near = TOLERANCE * self.period
        gap = (begin - at) % self.period
        gap = 0.0 if self.period - gap < near else gap
        return gap > length - near and gap + (end - begin) < self.period + near


def _block(
    stages: Stages, costs: Costs, period: float, gaps: Sequence[float], split: bool
) -> dict[tuple[int, Kind], float] | None:
    """Maps each stage and kind to the begin of the first microbatch's task; None where the period has no room.

    Gaps: before F in the first and second half of the stages, before B in the second and first half.
    """
    periods = [_Period(period) for _ in range(stages.rows)]
    begins: dict[tuple[int, Kind], float] = {}
    ends: dict[tuple[int, Kind], float] = {}

    def put(s: int, kind: Kind, ready: float, length: float) -> bool:
        begin: float | None = ready
        homes = [periods[home] for home in stages.stage_ranks[s]]
        while begin is not None:
            later = [one.next_clear(begin, length) for one in homes]
            if any(time is None for time in later):
                return False
            latest = max(time for time in later if time is not None)
            if latest <= begin or len(homes) == 1:
                begins[s, kind], ends[s, kind] = latest, latest + length
                for one in homes:
                    one.taken.append((latest, latest + length))
                return True
            begin = latest if latest < ready + len(homes) * period else None
        return False

    def hop(s: int, t: int, gap: float) -> float:
        return costs.travel(stages, s, t) + (gap if stages.crosses(s, t) else 0.0)

    half = len(stages) / 2
    every = range(len(stages))
    times = [dict(_kinds(stages, s, costs, split)) for s in every]
    for s in every:
        ready = max((ends[a, Kind.FORWARD] + hop(a, s, gaps[a >= half]) for a in stages.sources[s]), default=0.0)
        if not put(s, Kind.FORWARD, ready, times[s][Kind.FORWARD]):
            return None
    for s in reversed([s for s in every if stages.backward[s]]):
        ready = max(
            ends[s, Kind.FORWARD],
            *(ends[t, Kind.BACKWARD] + hop(s, t, gaps[2 + (t < half)]) for t in stages.gradient_targets[s]),
            0.0,
        )
        if not put(s, Kind.BACKWARD, ready, times[s][Kind.BACKWARD]):
            return None
    for s in reversed([s for s in every if Kind.WEIGHT in times[s]]):
        if not put(s, Kind.WEIGHT, ends[s, Kind.BACKWARD], times[s][Kind.WEIGHT]):
            return None
    return begins


def _repeated(stages: Stages, microbatches: int, begins: dict[tuple[int, Kind], float], period: float) -> Schedule:
    """The block once for every microbatch, a period apart."""
    order = {key: k for k, key in enumerate(begins)}
    rows: list[list[tuple[float, int, Task]]] = [[] for _ in range(stages.rows)]
    for (s, kind), begin in begins.items():
        for home in stages.stage_ranks[s]:
            rows[home] += [
                (round(begin + i * period, 9), i * len(order) + order[s, kind], Task(s, kind, i))
                for i in range(microbatches)
            ]
    return Schedule("auto", stages, microbatches, tuple(tuple(task for *_, task in sorted(row)) for row in rows))
