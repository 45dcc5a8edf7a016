"""Rows as text, as a plan lists them and `ir/schedule.txt` shows them.

schedule:
  - 0F0 0F1 0B0 0B1               # the row of the first home
  - "rank 1: 1F0 1B0 1F1 1B1"     # the name of the home may stand before its row
"""

from __future__ import annotations

from collections.abc import Sequence

from partc.compiler.errors import CompileError, Problem
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Stages
from partc.compiler.schedule.validity import WrongCell, check, problems, wrong_cells
from partc.runtime.artifact.tasks.task import Task, parse

_CELL = "a cell is a stage, F, B or W, and a microbatch, such as 2F0"


def schedule_of_text(
    rows: Sequence[str], stages: Stages, microbatches: int, where: str | Sequence[str] = "schedule"
) -> Schedule:
    """The valid schedule that rows of text describe; CompileError with all violations, each with its first wrong cell marked.

    `where` is the place of all rows, or of each.
    """
    places = [where] * len(rows) if isinstance(where, str) else list(where)
    if found := _misnamed(rows, stages, places):
        raise CompileError(found)
    cells = [row.rpartition(":")[2].split() for row in rows]
    tasks = [[_task(cell) for cell in row] for row in cells]
    unknown = [_unknown(r, c, cells[r][c]) for r, row in enumerate(tasks) for c, task in enumerate(row) if task is None]
    if unknown:
        raise CompileError(problems([*unknown, *wrong_cells(tasks, stages, microbatches)], places, stages, cells))
    known = tuple(tuple(task for task in row if task) for row in tasks)
    return check(Schedule("text", stages, microbatches, known), places)


def _task(cell: str) -> Task | None:
    try:
        return parse(cell)
    except ValueError:
        return None


def _unknown(row: int, cell: int, text: str) -> WrongCell:
    meant = text.upper()
    help = f"write {meant}" if _task(meant) else "write the task that runs there, or remove the cell"
    return WrongCell(row, cell, f"'{text}' is not a task", _CELL, help)


def _misnamed(rows: Sequence[str], stages: Stages, places: Sequence[str]) -> list[Problem]:
    """Problems of the number of rows, and of names that stand before them."""
    labels = [stages.label(home) for home in range(stages.rows)]
    if len(rows) != len(labels):
        fact = f"{len(rows)} {'row is' if len(rows) == 1 else 'rows are'} given for {len(labels)} homes: {', '.join(labels)}"
        law = "every home of a stage, a rank or a group of ranks, has one row, in the order of the ranks"
        return [
            Problem(
                places[0] if places else "schedule",
                fact,
                law,
                f"write {len(labels)} {'row' if len(labels) == 1 else 'rows'}",
            )
        ]
    faults = []
    for place, row, label in zip(places, rows, labels, strict=True):
        name, colon, _ = row.rpartition(":")
        if colon and " ".join(name.split()) != label:
            law = f"the rows are those of {', '.join(labels)}, in this order"
            faults.append(
                Problem(place, f"the row of {label} is named '{name.strip()}'", law, f"write '{label}:', or no name")
            )
    return faults
