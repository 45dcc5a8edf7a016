"""A task as schedules, rank files and plans write it, `2F0`, and a row of tasks with one cell marked.

2F0   the forward pass of stage 2 over microbatch 0
2B0   its backward pass: all of it, or, where the schedule has a 2W0, only the gradients of the stage's inputs
2W0   the gradients of its parameters, which no other task reads
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

_CELL = re.compile(r"(\d{1,9})([FBW])(\d{1,9})", re.ASCII)
_AROUND = 8
"""Cells shown on either side of the marked one."""


class Kind(StrEnum):
    """What a task computes; the letter is written between the stage and the microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Task(NamedTuple):
    """Stage, kind and microbatch; `str` gives `2F0`, and `parse` reads it back."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def body(self) -> str:
        """The function of a rank file that the task calls: `F2`."""
        return f"{self.kind}{self.stage}"


def parse(text: str) -> Task:
    """The task that a cell such as `2F0` names; ValueError, with what a cell is, for any other text."""
    found = _CELL.fullmatch(text)
    if found is None:
        raise ValueError("a cell is a stage, F, B or W, and a microbatch, such as 2F0")
    return Task(int(found[1]), Kind(found[2]), int(found[3]))


def marked(cells: Sequence[str], at: int) -> str:
    """Returns two lines: a row's cells around index `at`, and a mark below that cell; `at` is the row's length if its end lacks a cell."""
    begin, end = max(0, at - _AROUND), at + _AROUND + 1
    before = " ".join([*(["..."] if begin else []), *cells[begin:at], ""]).rstrip(" ")
    lead = f"    {before} " if before else "    "
    shown = cells[at] if at < len(cells) else ""
    behind = " ".join([*cells[at + 1 : end], *(["..."] if end < len(cells) else [])])
    line = f"{lead}{shown} {behind}".rstrip()
    return f"{line}\n{' ' * len(lead)}{'^' * max(1, len(shown))}"
