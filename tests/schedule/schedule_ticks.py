"""A second, simpler player of schedules, which the tests hold the compiler's against: a clock of unit ticks, and counting.

Task times are whole numbers of ticks. At every tick every row that is free begins its next task if all that it reads had ended before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cell = tuple[int, str, int]
Row = Sequence[Cell]


@dataclass(frozen=True)
class Played:
    """The tick at which all has ended, begins of tasks, and the most stage passes that each row keeps."""

    total: int
    begins: Mapping[Cell, int]
    peaks: tuple[int, ...]


def play(rows: Sequence[Row], reads: Mapping[int, Sequence[int]], ticks: Mapping[str, int]) -> Played:
    """`reads[s]`: the stages that stage s reads; `ticks`: of F, B and W; a B without W takes both. AssertionError if rows get stuck."""
    split = {(s, i) for row in rows for s, kind, i in row if kind == "W"}
    ended: dict[Cell, int] = {}
    begins: dict[Cell, int] = {}
    at, free, now = [0] * len(rows), [0] * len(rows), 0
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        for r, row in enumerate(rows):
            if at[r] == len(row) or free[r] > now:
                continue
            s, kind, i = cell = row[at[r]]
            if kind == "F":
                wanted = [(a, "F", i) for a in reads[s]]
            elif kind == "B":
                wanted = [(s, "F", i), *((b, "B", i) for b in reads if s in reads[b])]
            else:
                wanted = [(s, "B", i)]
            if all(ended.get(other, now + 1) <= now for other in wanted):
                whole = kind == "B" and (s, i) not in split
                free[r] = ended[cell] = now + ticks[kind] + (ticks["W"] if whole else 0)
                begins[cell] = now
                at[r] += 1
        now += 1
        assert now <= sum(sum(ticks.values()) * len(row) for row in rows) + 1, f"stuck at {at}"
    return Played(max(ended.values()), begins, tuple(_most_kept(row, split) for row in rows))


def _most_kept(row: Row, split: set[tuple[int, int]]) -> int:
    """The most passes of a row that are between F and the end of their backward pass, W counted."""
    kept: set[tuple[int, int]] = set()
    most = 0
    for s, kind, i in row:
        if kind == "F":
            kept.add((s, i))
        most = max(most, len(kept))
        if kind == "W" or (kind == "B" and (s, i) not in split):
            kept.remove((s, i))
    assert not kept
    return most
