"""A pipeline's step as the simulation has it with measured times, held against the measured step.

    compared(folder, schedule)      what `train_pipeline_times.py` measured there against `simulate()`

Times are those of the artifact's own tasks in the same steps, not of stages that are compiled alone: these would have neither the caches
nor the other ranks beside them. What begins communication, and what runs once before the first task or behind the last (the update), counts
to the task beside it; waits count to none, for these the simulation has to find. Messages take no time there, nor does what a step does
around its program (binding the batch, the agreement of the ranks).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from partc.compiler.schedule.costs import unit_costs
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import simulate
from partc.runtime.artifact.cells import Task, parse


def compared(folder: Path, schedule: Schedule) -> str:
    """Medians over steps: measured and simulated milliseconds and their ratio; by rank the time in tasks, waiting, and around."""
    ranks = [rank for home in schedule.stages.ranks for rank in home]
    found = {rank: json.loads((folder / f"times_{rank}.json").read_text()) for rank in ranks}
    shares = {home[0]: _tasks(found[home[0]]["actions"]) for home in schedule.stages.ranks}
    costs = unit_costs(schedule.stages)
    walls, totals = [], []
    for step in range(len(found[ranks[0]]["walls"])):
        times: dict[Task, float] = defaultdict(float)
        for rank, own in shares.items():
            for action, task in zip(found[rank]["actions"], own, strict=True):
                if task is not None:
                    times[task] += action["seconds"][step]
        totals.append(simulate(schedule, replace(costs, measured=times)).total)
        walls.append(max(one["walls"][step] for one in found.values()))
    ratio = statistics.median(wall / total for wall, total in zip(walls, totals, strict=True))
    wall, total = (1e3 * statistics.median(some) for some in (walls, totals))
    rows = [_row(rank, found[rank], wall) for rank in ranks]
    return "\n".join([f"measured {wall:9.3f}, simulated {total:9.3f}, measured/simulated {ratio:.3f}", *rows])


def _tasks(actions: list[dict[str, Any]]) -> list[Task | None]:
    """Per action the task to which its time counts: its own, else that before it, else the first; none of a wait."""
    at = next(parse(one["task"]) for one in actions if one["task"])
    found: list[Task | None] = []
    for one in actions:
        at = parse(one["task"]) if one["task"] else at
        found.append(None if one["kind"] == "wait" else at)
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
