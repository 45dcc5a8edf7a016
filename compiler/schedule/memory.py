"""The memory of a schedule's rows: saved values of microbatches per home, and the limit that a plan sets on them.

A microbatch is saved from the begin of F to the end of B; where B and W are apart, its deferred part from the end of B to that of W. While
B ends both may be there, so the larger of the two counts. Rows alone decide this, not times:

    1f1b, rank r of p: min(m, p - r) microbatches      zb_h1: min(m, p) on every rank      gpipe: m
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from partc.compiler.schedule.costs import BYTES, MICROBATCHES, Costs
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task
from partc.runtime.units import parse_bytes, size_text

_MICROBATCHES = re.compile(r"(\d+(?:\.\d+)?) ?microbatch(?:es)?")
TOLERANCE = 1e-9
"""Relative difference below which sums of times or sizes count as equal."""


@dataclass(frozen=True)
class Limit:
    """The most saved values that every home may keep, in bytes or in microbatches; `text` is the limit as the plan writes it."""

    amount: float
    unit: str = BYTES
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text or amount_text(self.amount, self.unit)


def parse_limit(text: str | int) -> Limit:
    """The limit of `4GB`, `512MiB`, a number of bytes, or `2.5 microbatches`; ValueError, with the forms, for anything else."""
    written = str(text).strip()
    if match := _MICROBATCHES.fullmatch(written):
        limit = Limit(float(match[1]), MICROBATCHES, written)
    elif isinstance(text, int) and not isinstance(text, bool):
        limit = Limit(float(text), BYTES)
    else:
        limit = Limit(float(0 if written.isdecimal() else parse_bytes(written) or 0), BYTES, written)
    if limit.amount <= 0:
        raise ValueError("a limit is an amount above 0 with its unit, such as 4GB, 512MiB or '2.5 microbatches'")
    return limit


def amount_text(amount: float, unit: str) -> str:
    """An amount of saved values: `2.5 microbatches`, `1.25 GiB`."""
    if unit == MICROBATCHES:
        return f"{amount:.6g} {'microbatch' if amount == 1 else 'microbatches'}"
    return size_text(amount)


def change(task: Task, split: bool, costs: Costs) -> float:
    """The change that a task makes to what its stage's ranks keep, once it has ended (F: once it begins)."""
    cost = costs.stages[task.stage]
    match task.kind:
        case Kind.FORWARD:
            return cost.saved
        case Kind.BACKWARD:
            return (cost.saved_for_weight if split else 0.0) - cost.saved
        case Kind.WEIGHT:
            return -cost.saved_for_weight


def peaks(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """The largest memory that the row of each home keeps at one time, in the costs' unit."""
    return tuple(max((0.0, *course(schedule, home, costs))) for home in range(schedule.stages.rows))


def course(schedule: Schedule, home: int, costs: Costs) -> list[float]:
    """The memory that a home keeps after each task of its row; stages without a backward pass save nothing."""
    kept, found = 0.0, []
    for task in schedule.rows[home]:
        if schedule.stages.backward[task.stage]:
            kept += change(task, schedule.is_split(task), costs)
        found.append(kept)
    return found


def peak_counts(schedule: Schedule, home: int, costs: Costs) -> tuple[dict[int, int], dict[int, int]]:
    """At the time when a home keeps most, by stage how many microbatches are saved for B, and how many for W."""
    kept, at = course(schedule, home, costs), 0
    if kept:
        at = max(range(len(kept)), key=lambda k: (kept[k], -k))
    saved, deferred = dict[int, int](), dict[int, int]()
    for task in schedule.rows[home][: at + 1]:
        if schedule.stages.backward[task.stage]:
            split, s = schedule.is_split(task), task.stage
            saved[s] = saved.get(s, 0) + {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}[task.kind]
            deferred[s] = deferred.get(s, 0) + split * {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.WEIGHT: -1}[task.kind]
    return saved, deferred


def one_microbatch(stages: Stages, costs: Costs) -> tuple[float, ...]:
    """The memory that one microbatch keeps in all stages of each home: `auto` accepts no lower limit."""
    return tuple(sum(costs.stages[s].saved for s in own if stages.backward[s]) for own in stages.on)


def within(kept: Sequence[float], limits: Sequence[float]) -> bool:
    """Whether no home keeps more than its limit."""
    return all(peak <= limit * (1 + TOLERANCE) for peak, limit in zip(kept, limits, strict=True))
