"""A pipeline's step as the simulation has it with measured times, held against the measured step.

    made = write_noting(folder, case, plan)     compiles, and notes of every value the task that makes it
    compared(folder, made)                      what `train_pipeline_times.py` measured there against `simulate()`

Times are those of the artifact's own segments in the same steps, not of stages that are compiled alone: these would have neither the caches
nor the other ranks beside them, and their segments would be other ones. A segment ends where a message leaves or is waited for, so it may
have several tasks of a row (`0B0 0F2`): its time is divided equally among those that end in it. Nothing is sent or waited for within a
segment, so any division gives the same total. What begins communication, and what runs once before the first task or behind the last (the
update), counts to the task beside it; waits count to none, for these the simulation has to find. Messages take no time there, nor does
what a step does around its program (binding the batch, the agreement of the ranks).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from partc.compiler.ir.program import Program
from partc.compiler.schedule.costs import unit_costs
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.task import Task
from partc.compiler.tasks import microbatches
from partc.compiler.tasks.phases import Place, outputs
from train_cases import Case, write


@dataclass(frozen=True)
class Made:
    """A schedule, and by rank the task of every value that one makes."""

    schedule: Schedule
    tasks: dict[int, dict[str, Task]]


def write_noting(folder: Path, case: Case, plan: str) -> Made:
    """Compiles as `write` does; reaches into the pass that writes the rows, which no user does."""
    tasks: dict[int, dict[str, Task]] = defaultdict(dict)

    class Noting(microbatches._Rows):
        """Notes of each value the task that is written. What runs once is written before the first task and behind the last."""

        def write(self, order: Iterable[Task]) -> Program:
            some = list(order)
            self.now = iter([None, *some, None])
            return super().write(some)

        def _write(self, places: Iterable[Place], k: int | None) -> None:
            before = [len(row.steps) for row in self.rows]
            super()._write(places, k)
            task = next(self.now)
            for row, begin in zip(self.rows, before, strict=True):
                names = [name for step in row.steps[begin:] for name in outputs(step) if name]
                if task is not None:
                    tasks[row.unit.program.rank].update(dict.fromkeys(names, task))

    with patch.object(microbatches, "_Rows", Noting):
        schedule = write(folder, case, plan, 1).program.schedule
    assert schedule is not None
    return Made(schedule, tasks)


def compared(folder: Path, made: Made) -> str:
    """Medians over steps: measured and simulated milliseconds and their ratio; by rank the time in tasks, waiting, and around."""
    schedule = made.schedule
    ranks = [rank for home in schedule.stages.ranks for rank in home]
    found = {rank: json.loads((folder / f"times_{rank}.json").read_text()) for rank in ranks}
    shares = {home[0]: _shares(found[home[0]]["actions"], made, at) for at, home in enumerate(schedule.stages.ranks)}
    costs = unit_costs(schedule.stages)
    walls, totals = [], []
    for step in range(len(found[ranks[0]]["walls"])):
        times: dict[Task, float] = defaultdict(float)
        for rank, own in shares.items():
            for action, some in zip(found[rank]["actions"], own, strict=True):
                for task in some:
                    times[task] += action["seconds"][step] / len(some)
        totals.append(simulate(schedule, replace(costs, measured=times)).total)
        walls.append(max(one["walls"][step] for one in found.values()))
    ratio = statistics.median(wall / total for wall, total in zip(walls, totals, strict=True))
    wall, total = (1e3 * statistics.median(some) for some in (walls, totals))
    rows = [_row(rank, found[rank], wall) for rank in ranks]
    return "\n".join([f"measured {wall:9.3f}, simulated {total:9.3f}, measured/simulated {ratio:.3f}", *rows])


def _shares(actions: list[dict[str, Any]], made: Made, home: int) -> list[list[Task]]:
    """Per action the tasks whose time its own is: of a segment those that end there, else the one that goes on."""
    row = made.schedule.rows[home]
    tasks = made.tasks[made.schedule.stages.ranks[home][0]]
    of = [list(dict.fromkeys(tasks[name] for name in one["made"] if name in tasks)) for one in actions]
    last = {task: index for index, some in enumerate(of) for task in some}
    if missing := [str(task) for task in row if task not in last]:
        raise SystemExit(f"no segment has {', '.join(missing)}")
    at, found = row[0], []
    for index, (one, some) in enumerate(zip(actions, of, strict=True)):
        ending = [task for task in some if last[task] == index]
        chosen = ending or some[:1] or [at]
        at = chosen[-1]
        found.append([] if one["kind"] == "wait" else chosen)
    return found


def _row(rank: int, found: dict[str, Any], wall: float) -> str:
    """Where a rank's time goes, medians in milliseconds."""

    def median(kind: str) -> float:
        some = [one["seconds"] for one in found["actions"] if one["kind"] == kind]
        return 1e3 * statistics.median(map(sum, zip(*some, strict=True))) if some else 0.0

    parts = {kind: median(kind) for kind in ("compute", "update", "begin", "wait")}
    own = 1e3 * statistics.median(found["walls"])
    text = ", ".join(f"{kind} {ms:.3f}" for kind, ms in parts.items())
    return f"    rank {rank}: {text}, around {own - sum(parts.values()):.3f} of {wall:.3f}"
