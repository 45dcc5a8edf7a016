"""Places W where it costs least: the order of F and B on every home stays, and W fills the time in which a home would wait.

A home runs the next task of its order as soon as it can. Where what this reads is not there yet, it runs the oldest W that is left; where
the limit has no room for the next F, too. What is left comes at the end. So the order of 1F1B with p microbatches becomes ZB-H1. Stages on
several homes, and those from which no cotangent leaves, keep whole backward passes. No task waits for the latter, so with `late_sources`
these, too, fill time in which a home would wait.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.memory import TOLERANCE, change
from partc.compiler.schedule.schedule import Schedule
from partc.runtime.artifact.tasks.task import Kind, Task


def fill(
    order: Schedule, costs: Costs, limits: Sequence[float], patience: float = 1.0, late_sources: bool = False
) -> Schedule | None:
    """The schedule with W; None where an order cannot keep to the limits. A W begins if at least `patience` of its time would be waited."""
    return _Fill(order, costs, limits, patience, late_sources).run()


@dataclass
class _Fill:
    """One run: per home the tasks to do in order, those that may come late, the row so far, what is kept, and when it is free."""

    order: Schedule
    costs: Costs
    limits: Sequence[float]
    patience: float
    late_sources: bool
    todo: list[deque[Task]] = field(init=False)
    late: list[deque[Task]] = field(init=False)
    rows: list[list[Task]] = field(init=False)
    used: list[float] = field(init=False)
    free: list[float] = field(init=False)
    ended: dict[Task, float] = field(default_factory=dict)
    ticks: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        stages = self.order.stages
        self.todo = [deque(task for task in row if task.kind is not Kind.WEIGHT) for row in self.order.rows]
        self.late, self.rows = [deque() for _ in self.todo], [[] for _ in self.todo]
        self.used, self.free = [0.0] * len(self.todo), [0.0] * len(self.todo)
        self.ticks = [(0.0, home) for home in range(len(self.todo))]
        self.split = [
            apart and len(homes) == 1 for apart, homes in zip(stages.splittable, stages.stage_ranks, strict=True)
        ]

    def run(self) -> Schedule | None:
        """Goes through the times at which a home may have something to do."""
        while self.ticks:
            now, home = heapq.heappop(self.ticks)
            if now >= self.free[home]:
                # backward passes for which no task waits leave the order as soon as they can run
                row = self.todo[home]
                while self.late_sources and row and self._may_wait(row[0]) and self._ready(row[0]) is not None:
                    self.late[home].append(row.popleft())
                task, begin = self._choose(home, now)
                if task is not None:
                    self._do(task, begin)
        if any(self.todo) or any(self.late):
            return None
        return Schedule(self.order.name, self.order.stages, self.order.microbatches, tuple(map(tuple, self.rows)))

    def _may_wait(self, task: Task) -> bool:
        stages = self.order.stages
        return (
            task.kind is Kind.BACKWARD
            and not stages.splittable[task.stage]
            and len(stages.stage_ranks[task.stage]) == 1
        )

    def _choose(self, home: int, now: float) -> tuple[Task | None, float]:
        """What an idle home begins, and when: the next task, a late one, or nothing until it is called again."""
        late = self.late[home]
        if not self.todo[home]:
            return (late[0], max(now, self._ready(late[0]) or 0.0)) if late else (None, now)
        task = self.todo[home][0]
        ready = self._ready(task)
        if ready is not None and self._fits(task):
            ready = max(ready, now)
            wait = ready - now
            if not late or wait <= TOLERANCE * now:
                return (task, ready)
            if wait < self.patience * self.costs.time(late[0], self._is_split(late[0])):
                return (task, ready)
        return (late[0], now) if late and (self._ready(late[0]) or 0.0) <= now else (None, now)

    def _ready(self, task: Task) -> float | None:
        """The time at which a task's operands are there; None while it is not known."""
        stages, ready = self.order.stages, 0.0
        for need in stages.needs(task):
            if need not in self.ended:
                return None
            ready = max(ready, self.ended[need] + self.costs.travel(stages, task.stage, need.stage))
        homes = stages.stage_ranks[task.stage]
        if len(homes) > 1:
            if any(not self.todo[home] or self.todo[home][0] != task for home in homes):
                return None
            ready = max(ready, *(self.free[home] for home in homes))
        return ready

    def _fits(self, task: Task) -> bool:
        """Whether the limits have room for a forward pass."""
        stages = self.order.stages
        if task.kind is not Kind.FORWARD or not stages.backward[task.stage]:
            return True
        saved = self.costs.stages[task.stage].saved
        return all(self.used[h] + saved <= self.limits[h] * (1 + TOLERANCE) for h in stages.stage_ranks[task.stage])

    def _is_split(self, task: Task) -> bool:
        """Whether a backward pass is B and W: not where what is kept for W would not fit."""
        if task.kind is not Kind.BACKWARD or not self.split[task.stage]:
            return False
        (home,) = self.order.stages.stage_ranks[task.stage]
        return self.used[home] + change(task, True, self.costs) <= self.limits[home] * (1 + TOLERANCE)

    def _do(self, task: Task, begin: float) -> None:
        stages = self.order.stages
        split = self._is_split(task)
        end = begin + self.costs.time(task, split)
        self.ended[task] = end
        for home in stages.stage_ranks[task.stage]:
            row = self.todo[home] if self.todo[home] and self.todo[home][0] == task else self.late[home]
            row.popleft()
            self.rows[home].append(task)
            self.free[home] = end
            if stages.backward[task.stage]:
                self.used[home] += change(task, split, self.costs)
            if split:
                self.late[home].append(Task(task.stage, Kind.WEIGHT, task.microbatch))
            heapq.heappush(self.ticks, (end, home))
        if task.kind is Kind.WEIGHT:
            return
        for reader in stages.neighbours[task.stage]:
            arrival = end + self.costs.travel(stages, reader, task.stage)
            for home in stages.stage_ranks[reader]:
                if self.free[home] < arrival:
                    heapq.heappush(self.ticks, (max(self.free[home], begin), home))
                    heapq.heappush(self.ticks, (arrival, home))
