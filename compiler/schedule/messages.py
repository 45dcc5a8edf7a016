"""Messages of a schedule: which stages read what a task made on other homes, and how many go between homes in a step."""

from __future__ import annotations

from collections import Counter

from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def readers(task: Task, stages: Stages) -> tuple[int, ...]:
    """The stages to which a message goes with what a task made."""
    if task.kind is Kind.FORWARD:
        there = {edge.target for edge in stages.edges if edge.source == task.stage}
    elif task.kind is Kind.BACKWARD:
        there = {edge.source for edge in stages.gradient_edges if edge.target == task.stage}
    else:
        there = set()
    return tuple(stage for stage in sorted(there) if stages.crosses(task.stage, stage))


def message_counts(schedule: Schedule) -> dict[tuple[str, str], int]:
    """Between which homes how many messages go in a step, both ways together: 2m over an edge of a chain, 4m in a V."""
    stages = schedule.stages
    found: Counter[tuple[int, ...]] = Counter()
    pairs: dict[tuple[int, ...], tuple[str, str]] = {}
    for task in {task for row in schedule.rows for task in row}:
        for reader in readers(task, stages):
            ends = sorted([stages.homes[task.stage], stages.homes[reader]])
            key = (*ends[0], -1, *ends[1])
            found[key] += 1
            pairs[key] = (stages.label(*ends[0]), stages.label(*ends[1]))
    return {pairs[key]: found[key] for key in sorted(found)}
