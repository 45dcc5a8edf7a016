"""Computes for which actions of other targets an action must wait, so that targets can run at the same time.

Each target has a lane of actions, in the order of the file. Two actions of different lanes keep that order if one writes bytes that the
other reads or writes. These are the bytes of a value, so that an action waits for the makers of its operands, and the bytes of every value
that was, or will be, at the same place of an arena. A value without a fixed place counts by its name.

    lane 0:   a writes 0:64      c reads 64:96
    lane 1:   b reads 0:64, writes 64:96          ->      b waits for a, c waits for b

An action waits for a number of completed actions of a lane. It does not wait if an earlier wait of its own lane implies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Range: TypeAlias = tuple[int, int] | str
"""A range of bytes, at least one, as (begin, end), or the name of a value without a fixed place."""
Waits: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a lane and the number of its actions that must be complete."""


@dataclass(frozen=True)
class Access:
    """An action: its lane, and the ranges that it reads and writes."""

    lane: int
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()


def waits_of(accesses: Sequence[Access], lanes: int) -> list[Waits]:
    """Returns the waits of each action.

    Memory is divided at every end of a range; for each part the last accesses of each lane are known.
    """
    cells = _Intervals(accesses)
    written = np.zeros((lanes, cells.count), np.int64)
    touched = np.zeros((lanes, cells.count), np.int64)
    known = np.zeros((lanes, lanes), np.int64)
    """For each lane, the number of actions of every lane that are certain to be done when its next action begins."""
    after: list[list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = [[] for _ in range(lanes)]
    all_waits: list[Waits] = []
    for access in accesses:
        lane = access.lane
        reads, writes = ([cells.of(one) for one in some] for some in (access.reads, access.writes))
        need = np.zeros(lanes, np.int64)
        for ranges, last in ((reads, written), (writes, touched)):
            for begin, end in ranges:
                if begin < end:
                    np.maximum(need, last[:, begin:end].max(axis=1), out=need)
        need[lane] = 0
        waits = []
        for other in np.argsort(-need, kind="stable").tolist():
            if need[other] > known[lane, other]:
                waits.append((other, int(need[other])))
                known[lane] = np.maximum(known[lane], after[other][need[other] - 1])
        all_waits.append(tuple(sorted(waits)))
        known[lane, lane] += 1
        after[lane].append(known[lane].copy())
        for begin, end in (*reads, *writes):
            touched[lane, begin:end] = known[lane, lane]
        for begin, end in writes:
            written[lane, begin:end] = known[lane, lane]
    return all_waits


class _Intervals:
    """The parts into which the ends of all ranges divide memory, and one part for each name."""

    def __init__(self, accesses: Sequence[Access]) -> None:
        every = {one for access in accesses for one in (*access.reads, *access.writes)}
        ends = sorted({end for one in every if not isinstance(one, str) for end in one})
        self._places = {end: place for place, end in enumerate(ends)}
        names = sorted(one for one in every if isinstance(one, str))
        self._names = {name: len(ends) + place for place, name in enumerate(names)}
        self.count = len(ends) + len(names)

    def of(self, one: Range) -> tuple[int, int]:
        """Returns the parts of a range, as (begin, end)."""
        if isinstance(one, str):
            return self._names[one], self._names[one] + 1
        return self._places[one[0]], self._places[one[1]]
