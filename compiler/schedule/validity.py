"""Checks whether a schedule is valid, and reports every violation with the first wrong cell marked.

1. Every cell is a task of a stage on this home, of a microbatch that there is, and of a kind that the stage has.
2. Every F, and every B of a stage with a backward pass, appears once in the row of each of its homes; a W at most once. Without a W, B is
   the whole backward pass. B and W are apart only where a cotangent leaves the stage; else B would be empty.
3. No task comes before one of its own row for which it waits.
4. Rows do not wait for each other. Then all ranks follow one order of events, without deadlock even if Sends wait for their receivers.

A wrong cell of a row, shown in its row with a mark below.

plan.yaml:12: rank 1, cell 4: 1B0 appears twice, first in cell 2
    1F0 1B0 1F1 1B0 1B1
                ^^^
  every task runs once
  help: remove one of the two
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partc.compiler.errors import CompileError, Problem
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import precedence
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task, marked
from partc.runtime.units import first_of


@dataclass(frozen=True)
class WrongCell:
    """A violation in one cell of a row; `cell` is its position from 0, or the row's length where something is missing at the end."""

    row: int
    cell: int
    fact: str
    law: str
    help: str = ""

    def problem(self, where: str, label: str, cells: Sequence[str], more: int = 0) -> Problem:
        """The problem with its cell marked; `more` other cells of the row are wrong in the same way."""
        also = f" (and {more:,} more of this row like it)" if more else ""
        fact = f"{label}, cell {self.cell + 1}: {self.fact}{also}\n{marked(cells, self.cell)}"
        return Problem(where, fact, self.law, self.help)


_SHOWN = 6
_ONCE = "every F and every B runs once on each home of its stage, a W at most once"
_WAITS = "F waits for the F of the stages that it reads from; B for its own F and for the B of the stages that read from it; W for its B"


def validate(schedule: Schedule, where: str | Sequence[str] = "schedule") -> list[Problem]:
    """All violations, in the order of rows and cells; empty for a valid schedule."""
    found = [*wrong_cells(schedule.rows, schedule.stages, schedule.microbatches), *_missing(schedule)]
    if not found:
        found = list(_early(schedule)) or list(_waiting(schedule))
    return problems(found, where, schedule.stages, [list(map(str, row)) for row in schedule.rows])


def check(schedule: Schedule, where: str | Sequence[str] = "schedule") -> Schedule:
    """The schedule itself; CompileError with all violations if it is not valid."""
    if found := validate(schedule, where):
        raise CompileError(found)
    return schedule


def problems(
    wrong: Iterable[WrongCell], where: str | Sequence[str], stages: Stages, rows: Sequence[Sequence[str]]
) -> list[Problem]:
    """The problems of wrong cells, by row; cells of one row that break the same law are one problem. `where`: of all rows, or of each."""
    kinds: dict[tuple[int, str], list[WrongCell]] = {}
    for one in sorted(wrong, key=lambda one: (one.row, one.cell)):
        kinds.setdefault((one.row, one.law), []).append(one)
    return [
        first.problem(where if isinstance(where, str) else where[row], stages.label(row), rows[row], len(others))
        for (row, _), (first, *others) in kinds.items()
    ]


def wrong_cells(rows: Sequence[Sequence[Task | None]], stages: Stages, microbatches: int) -> Iterator[WrongCell]:
    """Tasks that cannot be where they are, whatever the other cells are, and tasks that appear twice; None is skipped."""
    for home, row in enumerate(rows):
        first: dict[Task, int] = {}
        for cell, task in enumerate(row):
            if task is None:
                continue
            if wrong := _wrong(task, home, stages, microbatches):
                yield WrongCell(home, cell, *wrong)
            elif task in first:
                fact = f"{task} appears twice, first in cell {first[task] + 1}"
                yield WrongCell(home, cell, fact, _ONCE, "remove one of the two")
            else:
                first[task] = cell


def _wrong(task: Task, home: int, stages: Stages, microbatches: int) -> tuple[str, str, str] | None:
    """Fact, law and help if a task cannot stand in this row at all."""
    if task.stage >= len(stages):
        last = len(stages) - 1
        return (
            f"{task} is of stage {task.stage}",
            f"the stages are 0 to {last}",
            f"the first number is the stage: 0 to {last}",
        )
    if task.microbatch >= microbatches:
        last = microbatches - 1
        return (
            f"{task} is of microbatch {task.microbatch}",
            f"the microbatches are 0 to {last}",
            f"the last number is the microbatch: 0 to {last}; or set microbatches: {task.microbatch + 1}",
        )
    if home not in stages.stage_ranks[task.stage]:
        homes = stages.label(*stages.stage_ranks[task.stage])
        own = ", ".join(map(str, stages.on[home])) or "none"
        law = f"a stage runs where its nodes are placed; stages on {stages.label(home)}: {own}"
        return f"{task} is of stage {task.stage}, which is on {homes}", law, f"move it to the row of {homes}"
    if task.kind is not Kind.FORWARD and not stages.backward[task.stage]:
        return f"{task} is of a stage that has F alone", "no gradient goes through this stage", f"remove {task}"
    if task.kind is Kind.WEIGHT and not stages.splittable[task.stage]:
        whole = Task(task.stage, Kind.BACKWARD, task.microbatch)
        law = f"no cotangent leaves stage {task.stage}, so its backward pass is one task"
        return f"{task} is of a stage whose backward pass is whole", law, f"remove {task}: {whole} is all of it"
    return None


def _missing(schedule: Schedule) -> Iterator[WrongCell]:
    stages = schedule.stages
    for home, row in enumerate(schedule.rows):
        there = set(row)
        wanted = [
            Task(s, kind, i)
            for s in stages.on[home]
            for kind in ((Kind.FORWARD, Kind.BACKWARD) if stages.backward[s] else (Kind.FORWARD,))
            for i in range(schedule.microbatches)
        ]
        wanted += [
            Task(s, Kind.WEIGHT, i) for s, i in sorted(schedule.split) if s in stages.on[home] and stages.splittable[s]
        ]
        absent = [task for task in wanted if task not in there]
        if absent:
            tasks = first_of([*map(str, absent)], _SHOWN, between=" ")
            fact = f"{tasks} {'is' if len(absent) == 1 else 'are'} missing"
            yield WrongCell(home, len(row), fact, f"in every row: {_ONCE}", "add what is missing")


def _early(schedule: Schedule) -> Iterator[WrongCell]:
    for home, row in enumerate(schedule.rows):
        place = {task: cell for cell, task in enumerate(row)}
        for cell, task in enumerate(row):
            late = [need for need in schedule.stages.needs(task) if place.get(need, -1) > cell]
            if late:
                fact = f"{task} comes before {late[0]} (cell {place[late[0]] + 1}), for which it waits"
                yield WrongCell(home, cell, fact, _WAITS, f"move {task} after {late[0]}")


def _waiting(schedule: Schedule) -> Iterator[WrongCell]:
    """Rows that wait for each other: one problem, at the first cell of the cycle."""
    cycle, stages = precedence(schedule).cycle, schedule.stages
    place = {(task, home): cell for home, row in enumerate(schedule.rows) for cell, task in enumerate(row)}
    reading = [k for k, task in enumerate(cycle) if cycle[(k + 1) % len(cycle)] in stages.needs(task)]
    steps_told: list[tuple[int, int, str, str]] = []
    for k, after in zip(reading, [*reading[1:], *reading[:1]], strict=True):
        task, read, behind = cycle[k], cycle[(k + 1) % len(cycle)], cycle[after]
        home = min(stages.stage_ranks[task.stage])
        shared = set(stages.stage_ranks[read.stage]) & set(stages.stage_ranks[behind.stage])
        on = f" on {stages.label(min(shared))}" if shared else ""
        steps_told.append(
            (
                home,
                place[task, home],
                f"{task} waits for {read}",
                "" if read == behind else f"which comes after {behind}{on}",
            )
        )
    if steps_told:
        start = steps_told.index(min(steps_told))
        home, cell, *_ = steps_told[start]
        steps = [text for _, _, *texts in (*steps_told[start:], *steps_told[:start]) for text in texts if text]
        fact = f"{schedule.rows[home][cell]} never runs: {', '.join(steps)}"
        help = "move one of these tasks to another place of its row to break the cycle"
        yield WrongCell(home, cell, fact, "rows must not wait for each other", help)
    elif cycle:
        home = min(h for task in cycle for h in stages.stage_ranks[task.stage])
        cell = min(place[task, home] for task in cycle if (task, home) in place)
        fact = f"the order of {' and '.join(map(str, cycle))} is another one in another row of the same stages"
        yield WrongCell(home, cell, fact, "homes that share a stage run its tasks in one order", "give them one order")
