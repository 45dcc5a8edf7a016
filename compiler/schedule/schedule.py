"""A schedule: for each home the row of its tasks in the order in which they run, as data that can be printed, parsed and checked.

    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

A schedule says nothing of messages: these follow from the stages' edges (`grid.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task

Row = tuple[Task, ...]


@dataclass(frozen=True)
class Schedule:
    """`rows[h]` are the tasks of home h; `name` is what a plan calls the schedule, `text` for rows given as text."""

    name: str
    stages: Stages
    microbatches: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{self.stages.label(h)}: {' '.join(map(str, row))}".rstrip() for h, row in enumerate(self.rows)
        )

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward pass that is B and W."""
        return frozenset((t.stage, t.microbatch) for row in self.rows for t in row if t.kind is Kind.WEIGHT)

    def is_split(self, task: Task) -> bool:
        """Whether the task's backward pass is B and W."""
        return (task.stage, task.microbatch) in self.split

    def split_alike(self) -> Schedule:
        """The schedule with all backward passes of a stage split where some are, W right behind B: a body is one for all microbatches."""
        stages = {stage for stage, _ in self.split}

        def with_weights(row: Row) -> Iterator[Task]:
            for task in row:
                yield task
                if task.kind is Kind.BACKWARD and task.stage in stages and not self.is_split(task):
                    yield task._replace(kind=Kind.WEIGHT)

        return replace(self, rows=tuple(tuple(with_weights(row)) for row in self.rows))


def scheduled(name: str, stages: Stages, microbatches: int, by_stage: Iterable[tuple[int, Iterable[Task]]]) -> Schedule:
    """The schedule of rows that are given with their home; a stage that cannot be split keeps its whole B, and has no W.

    Tasks of stages without a backward pass are F alone.
    """
    rows: list[Row] = [()] * stages.rows
    for home, row in by_stage:
        rows[home] = tuple(
            task
            for task in row
            if task.kind is Kind.FORWARD
            or (stages.splittable[task.stage] if task.kind is Kind.WEIGHT else stages.backward[task.stage])
        )
    return Schedule(name, stages, microbatches, tuple(rows))
