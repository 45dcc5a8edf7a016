"""The times of a schedule: when every task begins and ends, the duration of a step, the idle time of each home, and the critical path.

A task begins when the one before it in its row has ended and all that it reads has arrived; a message travels beside the work of both
ranks. A stage on several homes begins on all of them at once.

    begin(t) = max of end(before t in its rows), end(u) + travel(u -> t) for all u that t reads       end(t) = begin(t) + time(t)

`total` is the step from the first begin to the last end: all ranks begin a step together. `period` is the time from step to step where a
rank may begin the next step as soon as it has ended its own row.

The precedence between tasks: each waits for others because of the stages' edges and the order of the rows.

A task waits for the tasks whose results it reads, and for the task before it in each of its rows. Rows can run if and only if these waits
have no cycle. Then there is one order of all tasks. If every message stands right behind the task that makes it, in the sender's row and in
the receiver's, all ranks follow one order of events, and no deadlock is possible even if every Send waits for its receiver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from partc.compiler.schedule.costs import Costs
from partc.compiler.schedule.schedule import Schedule
from partc.runtime.artifact.tasks.task import Task


@dataclass(frozen=True)
class Precedence:
    """`order`: all tasks that can run, each behind the tasks that it waits for. `waits`: what each task waits for."""

    order: tuple[Task, ...]
    waits: dict[Task, tuple[Task, ...]]

    @property
    def cycle(self) -> tuple[Task, ...]:
        """Tasks of which each waits for the next, and the last for the first; empty where all can run."""
        done = set(self.order)
        if len(done) == len(self.waits):
            return ()
        at = next(task for task in self.waits if task not in done)
        way: dict[Task, int] = {}
        while at not in way:
            way[at] = len(way)
            at = next(other for other in self.waits[at] if other not in done)
        return tuple(way)[way[at] :]


def precedence(schedule: Schedule) -> Precedence:
    """Returns the precedence between the tasks of a schedule; its rows must have every task that is read, each once."""
    before: dict[Task, list[Task]] = {}
    for row in schedule.rows:
        for k, task in enumerate(row):
            found = before.setdefault(task, [])
            if k and row[k - 1] not in found:
                found.append(row[k - 1])
    waits = {
        task: (*found, *(need for need in schedule.stages.needs(task) if need not in found and need in before))
        for task, found in before.items()
    }
    readers: dict[Task, list[Task]] = {task: [] for task in waits}
    for task, others in waits.items():
        for other in others:
            readers[other].append(task)
    left = {task: len(others) for task, others in waits.items()}
    ready, order = deque(task for task, count in left.items() if not count), []
    while ready:
        order.append(task := ready.popleft())
        for reader in readers[task]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return Precedence(tuple(order), waits)


@dataclass(frozen=True)
class Timing:
    """Begin and end of every task, in an order in which they can run; per home the busy time; the tasks that make up the total."""

    spans: Mapping[Task, tuple[float, float]]
    total: float
    period: float
    busy: tuple[float, ...]
    critical: tuple[Task, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """The time of the step in which each home runs no task: its bubble."""
        return tuple(self.total - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of all homes that have tasks."""
        some = [busy for busy in self.busy if busy]
        return 1 - sum(some) / len(some) / self.total if self.total else 0.0

    @property
    def overhead(self) -> float:
        """The total over what the busiest home needs, less one: what papers give as the bubble's ratio."""
        return self.total / max(self.busy) - 1 if self.total else 0.0


def simulate(schedule: Schedule, costs: Costs, known: Precedence | None = None) -> Timing:
    """The times of a valid schedule; ValueError for rows that wait for each other. `known`: its precedence, if that is known."""
    stages, known = schedule.stages, known or precedence(schedule)
    if known.cycle:
        raise ValueError(f"tasks wait for each other: {' '.join(map(str, known.cycle))}")
    spans: dict[Task, tuple[float, float]] = {}
    cause: dict[Task, Task | None] = {}
    for task in known.order:
        begin, last = 0.0, None
        reads = stages.needs(task)
        for other in known.waits[task]:
            ended = spans[other][1]
            if other in reads:
                ended += costs.travel(stages, task.stage, other.stage)
            if last is None or ended > begin:
                begin, last = ended, other
        spans[task] = (begin, begin + costs.time(task, schedule.is_split(task)))
        cause[task] = last
    total = max((end for _, end in spans.values()), default=0.0)
    busy = tuple(sum(spans[task][1] - spans[task][0] for task in row) for row in schedule.rows)
    period = max((spans[row[-1]][1] - spans[row[0]][0] for row in schedule.rows if row), default=0.0)
    return Timing(spans, total, period, busy, _critical(spans, cause, total))


def _critical(
    spans: Mapping[Task, tuple[float, float]], cause: Mapping[Task, Task | None], total: float
) -> tuple[Task, ...]:
    """The tasks that led to the end of the step, each the one for which the next waited."""
    at = next((task for task, (_, end) in spans.items() if end == total), None)
    way = []
    while at is not None:
        way.append(at)
        at = cause[at]
    return tuple(reversed(way))
