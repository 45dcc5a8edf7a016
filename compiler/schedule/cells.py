"""A wrong cell of a row, shown in its row with a mark below.

plan.yaml:12: rank 1, cell 4: 1B0 appears twice, first in cell 2
    1F0 1B0 1F1 1B0 1B1
                ^^^
  every task runs once
  help: remove one of the two
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.errors import Problem
from partc.runtime.artifact.tasks.task import marked


@dataclass(frozen=True)
class WrongCell:
    """What is wrong with one cell of a row; `cell` is its place from 0, or the row's length where something is missing at the end."""

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
