"""What a schedule's rows take at least, whose tasks take at least so long: as `partc.compiler.schedule.simulate`, of a chain of stages.

    F    begins behind the task before it in its row, and behind what the stage before it sends
    B    ends behind all of it that follows the task before it in its row, and behind what of it follows what the later stage sends
    W    where it is apart, begins behind the task before it

A message is under way for a time of its own, and holds up no other.
A search bounds hundreds of candidates, so orders of tasks are kept as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from partc.cli.simulation.known_program import Seconds
from partc.compiler.schedule.stages import chain
from partc.compiler.schedulers.choose import NAMED
from partc.runtime.artifact.tasks.task import Kind, Task


@dataclass(frozen=True)
class Times:
    """By stage the seconds of its tasks, of B behind what the later stage sends, and of a message between it and the next stage."""

    forward: Seconds
    backward: Seconds
    behind: Seconds
    weight: Seconds
    message: Seconds


@dataclass(frozen=True)
class _Order:
    """Tasks in an order in which they can run: the stage of each, its kind, and the places of the task before it in its row, and of the one
    on another home that it reads; -1 for none. `last`: by stage the place of its last task."""

    tasks: Sequence[tuple[int, Kind, int, int]]
    last: Sequence[int]


def ends_of(schedule: str, homes: tuple[int, ...], microbatches: int, times: Times) -> Seconds:
    """By stage when its last task ends at the earliest."""
    order = _order(schedule, homes, microbatches)
    some = times.forward, times.backward, times.behind, times.weight, times.message
    forward, backward, behind, weight, message = (one.tolist() for one in some)
    ends = list[float]()
    for stage, kind, before, read in order.tasks:
        begin = ends[before] if before >= 0 else 0.0
        if kind is Kind.FORWARD:
            if read >= 0:
                begin = max(begin, ends[read] + message[stage - 1])
            ends.append(begin + forward[stage])
        elif kind is Kind.BACKWARD:
            end = begin + backward[stage]
            ends.append(max(end, ends[read] + message[stage] + behind[stage]) if read >= 0 else end)
        else:
            ends.append(begin + weight[stage])
    return np.array([ends[at] for at in order.last])


@cache
def _order(schedule: str, homes: tuple[int, ...], microbatches: int) -> _Order:
    rows = NAMED[schedule].make(chain(homes), microbatches).rows
    tasks, at, ends = list[tuple[int, Kind, int, int]](), [0] * len(rows), [-1] * len(rows)
    number, last, count = dict[Task, int](), [0] * len(homes), sum(map(len, rows))
    while (begun := len(tasks)) < count:
        for home, row in enumerate(rows):
            while at[home] < len(row):
                stage, kind, microbatch = task = row[at[home]]
                maker = stage - 1 if kind is Kind.FORWARD else stage + 1 if kind is Kind.BACKWARD else stage
                read = -1
                if 0 <= maker < len(homes) and homes[maker] != home:
                    read = number.get(Task(maker, kind, microbatch), count)
                    if read == count:  # it is not in the order yet
                        break
                tasks.append((stage, kind, ends[home], read))
                number[task] = ends[home] = last[stage] = len(tasks) - 1
                at[home] += 1
        assert len(tasks) > begun, f"the tasks of {schedule} wait for each other"
    return _Order(tasks, last)
