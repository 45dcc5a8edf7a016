"""An order of F and whole B that runs any ready task: backward before forward, and forward passes only where all can still finish.

A forward pass is admitted if every microbatch that is not through could then still pass all stages of the home, the oldest first, beside
what newer ones keep (the banker's rule). So the oldest one never waits forever, and a limit either holds for one microbatch or is refused.
Among what is ready, a B wins over an F; further by `Preference`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import TOLERANCE
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


class Preference(Enum):
    """Which of several forward (backward) passes of a home comes first."""

    DEEP = "the last (first) stage"
    ROUNDS = "in rounds of as many microbatches as homes, the last (first) stage"
    OLDEST = "the oldest microbatch"
    WIDE = "the first (last) stage"


def greedy(
    stages: Stages, microbatches: int, costs: Costs, limits: Sequence[float], preference: Preference
) -> Schedule:
    """A valid schedule of whole backward passes within limits that hold one microbatch."""
    return _Greedy(stages, microbatches, costs, limits, preference).run()


@dataclass
class _Greedy:
    stages: Stages
    microbatches: int
    costs: Costs
    limits: Sequence[float]
    preference: Preference
    rows: list[list[Task]] = field(init=False)
    held: list[dict[int, float]] = field(init=False)
    free: list[float] = field(init=False)
    ticks: list[tuple[float, int]] = field(init=False)
    ended: dict[Task, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.stages.rows)]
        self.held = [{} for _ in self.rows]
        self.oldest = [0] * len(self.rows)
        self.free = [0.0] * len(self.rows)
        self.ticks = [(0.0, home) for home in range(len(self.rows))]
        self.next = {(s, kind): 0 for s in range(len(self.stages)) for kind in (Kind.FORWARD, Kind.BACKWARD)}

    def run(self) -> Schedule:
        """Goes through the times at which a home may have something to do."""
        while self.ticks:
            now, home = heapq.heappop(self.ticks)
            if now >= self.free[home] and (task := self._choose(home, now)):
                self._do(task, now)
        return Schedule("auto", self.stages, self.microbatches, tuple(map(tuple, self.rows)))

    def _choose(self, home: int, now: float) -> Task | None:
        """The task that a home begins now, if any: one on several homes begins when the last of them is free."""
        ready = []
        for s in self.stages.on[home]:
            for kind in (Kind.BACKWARD, Kind.FORWARD) if self.stages.backward[s] else (Kind.FORWARD,):
                task = Task(s, kind, self.next[s, kind])
                if task.microbatch < self.microbatches and self._has_inputs(task, now) and self._is_admitted(task):
                    ready.append(task)
        if not ready:
            return None
        task = min(ready, key=self._key)
        return task if all(self.free[other] <= now for other in self.stages.stage_ranks[task.stage]) else None

    def _has_inputs(self, task: Task, now: float) -> bool:
        until = now * (1 + TOLERANCE)
        for need in self.stages.needs(task):
            end = self.ended.get(need, math.inf)
            if end > until or end + self.costs.travel(self.stages, task.stage, need.stage) > until:
                return False
        return True

    def _is_admitted(self, task: Task) -> bool:
        """Whether afterwards every microbatch that is not through still can be, the oldest first."""
        if task.kind is not Kind.FORWARD or not self.stages.backward[task.stage]:
            return True
        saved = self.costs.stages[task.stage].saved
        return all(self._holds(home, task.microbatch, saved) for home in self.stages.stage_ranks[task.stage])

    def _holds(self, home: int, microbatch: int, saved: float) -> bool:
        held = self.held[home]
        own = [s for s in self.stages.on[home] if self.stages.backward[s]]
        newer, limit = 0.0, self.limits[home] * (1 + TOLERANCE)
        for i in range(max([microbatch, *held]), self.oldest[home] - 1, -1):
            mine = held.get(i, 0.0) + (saved if i == microbatch else 0.0)
            coming = sum(self.costs.stages[s].saved for s in own if self.next[s, Kind.FORWARD] <= i)
            coming -= saved if i == microbatch else 0.0
            if mine + coming + newer > limit:
                return False
            newer += mine
        return True

    def _key(self, task: Task) -> tuple[bool, int, int, int]:
        stage, kind, i = task
        forward = kind is Kind.FORWARD
        deep = -stage if forward else stage
        match self.preference:
            case Preference.DEEP:
                return forward, 0, deep, i
            case Preference.ROUNDS:
                return forward, i // self.stages.rows, deep, i
            case Preference.OLDEST:
                return forward, i, deep, 0
            case Preference.WIDE:
                return forward, 0, -deep, i

    def _do(self, task: Task, now: float) -> None:
        stages = self.stages
        end = self.ended[task] = now + self.costs.time(task, False)
        self.next[task.stage, task.kind] += 1
        for home in stages.stage_ranks[task.stage]:
            self.rows[home].append(task)
            self.free[home] = end
            if stages.backward[task.stage]:
                self._keep(home, task)
            heapq.heappush(self.ticks, (end, home))
        for s in stages.neighbours[task.stage]:
            arrival = end + self.costs.travel(stages, s, task.stage)
            for home in stages.stage_ranks[s]:
                if home not in stages.stage_ranks[task.stage] or arrival > end:
                    heapq.heappush(self.ticks, (max(self.free[home], arrival), home))

    def _keep(self, home: int, task: Task) -> None:
        sign, i = (1 if task.kind is Kind.FORWARD else -1), task.microbatch
        self.held[home][i] = self.held[home].get(i, 0.0) + sign * self.costs.stages[task.stage].saved
        if all(self.next[s, Kind.BACKWARD] > i for s in self.stages.on[home] if self.stages.backward[s]):
            del self.held[home][i]
            while all(
                self.next[s, Kind.BACKWARD] > self.oldest[home] for s in self.stages.on[home] if self.stages.backward[s]
            ):
                self.oldest[home] += 1
                if self.oldest[home] >= self.microbatches:
                    break
