"""The precedence between tasks: each waits for others because of the stages' edges and the order of the rows.

A task waits for the tasks whose results it reads, and for the task before it in each of its rows. Rows can run if and only if these waits
have no cycle. Then there is one order of all tasks. If every message stands right behind the task that makes it, in the sender's row and in
the receiver's, all ranks follow one order of events, and no deadlock is possible even if every Send waits for its receiver.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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
