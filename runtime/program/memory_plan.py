"""Assigns places in memory to the values outside of sessions: one arena, shared by values whose lifetimes do not overlap.

A value lives from the step that makes it, or posts its receive, to the last step that reads it, and longer while a send of it is in flight.
Values get places in the order of their births, each at the lowest free offset. Where the arena would have to grow, the place of a value
with a send in flight may be reused: then the plan says that this step first waits for that send. Only sends issued before the previous step
are chosen, so that computation had time to overlap with the send.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from partc.runtime.artifact.tensors.tensor import ALIGNMENT


@dataclass(frozen=True)
class Lifetime:
    """A value's bytes and life in step numbers: made in `born`, last read in `died`, sent in the steps `sends`."""

    name: str
    bytes: int
    born: int
    died: int
    sends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arena:
    """The plan: the arena's size, the offset of each value, and for each step the sends to wait for before it."""

    bytes: int
    offsets: dict[str, int]
    waits: dict[int, list[int]]


@dataclass(eq=False)
class _Holder:
    offset: int
    size: int
    life: Lifetime


def _last_read(one: _Holder) -> int:
    return one.life.died


@dataclass
class _Gaps:
    """Free intervals, sorted and disjoint; the last one is unbounded."""

    begins: list[int] = field(default_factory=lambda: [0])
    ends: list[float] = field(default_factory=lambda: [math.inf])

    def lowest(self, size: int) -> int:
        """Returns the lowest offset at which `size` bytes are free."""
        return next(begin for begin, end in zip(self.begins, self.ends, strict=True) if begin + size <= end)

    def take(self, offset: int, size: int) -> None:
        """Marks `size` bytes at the begin of a gap as used."""
        at = bisect_left(self.begins, offset)
        if offset + size < self.ends[at]:
            self.begins[at] = offset + size
        else:
            del self.begins[at], self.ends[at]

    def free(self, holder: _Holder) -> None:
        """Frees the place of a holder."""
        begin, end = holder.offset, holder.offset + holder.size
        at = bisect_left(self.begins, begin)
        if self.begins[at] == end:
            self.begins[at] = begin
        else:
            self.begins.insert(at, begin)
            self.ends.insert(at, end)
        if at and self.ends[at - 1] == begin:
            del self.ends[at - 1], self.begins[at]


@dataclass
class _Plan:
    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    waits: dict[int, list[int]] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    gaps: _Gaps = field(default_factory=_Gaps)
    needed: list[_Holder] = field(default_factory=list)
    """The values that are read in this step or later, ordered by their last reads."""
    sent: list[_Holder] = field(default_factory=list)
    """The values that are no longer read, with a send in flight."""
    cleared: int | None = None
    """The step for which `needed` and `sent` were last updated; None after a wait for sends."""

    def in_flight(self, life: Lifetime) -> list[int]:
        return [send for send in life.sends if send not in self.waited]

    def place(self, life: Lifetime) -> None:
        if self.cleared != life.born:
            ended = bisect_left(self.needed, life.born, key=_last_read)
            self.sent += self.needed[:ended]
            del self.needed[:ended]
            for one in self.sent:
                if not self.in_flight(one.life):
                    self.gaps.free(one)
            self.sent = [one for one in self.sent if self.in_flight(one.life)]
            self.cleared = life.born
        size = -(-life.bytes // ALIGNMENT) * ALIGNMENT
        offset = self.gaps.lowest(size)
        if offset + size > self.size:
            offset = self._taken(life, size, offset)
        self.offsets[life.name] = offset
        self.size = max(self.size, offset + size)
        self.gaps.take(offset, size)
        insort(self.needed, _Holder(offset, size, life), key=_last_read)

    def _taken(self, life: Lifetime, size: int, otherwise: int) -> int:
        """Returns a place within the arena that becomes free by waiting for the fewest, oldest sends; else `otherwise`."""
        idle = [one for one in self.sent if max(one.life.sends) < life.born - 1]
        idle.sort(key=lambda one: (max(one.life.sends), one.offset))
        gaps = _Gaps([*self.gaps.begins], [*self.gaps.ends])
        for count, last in enumerate(idle, 1):
            gaps.free(last)
            offset = gaps.lowest(size)
            if offset + size <= self.size:
                overlapped = [
                    one for one in idle[:count] if one.offset < offset + size and offset < one.offset + one.size
                ]
                sends = sorted({send for one in overlapped for send in self.in_flight(one.life)})
                self.waits.setdefault(life.born, []).extend(sends)
                self.waited.update(sends)
                self.sent = [one for one in self.sent if one not in overlapped]
                for one in overlapped:
                    self.gaps.free(one)
                self.cleared = None  # other values of these sends may have ended, too
                return offset
        return otherwise


def assign(lives: Sequence[Lifetime]) -> Arena:
    """Returns an arena in which no two values that live at the same time overlap. Values of no bytes have offset 0."""
    plan = _Plan()
    for life in sorted(lives, key=lambda one: one.born):
        if life.bytes:
            plan.place(life)
        else:
            plan.offsets[life.name] = 0
    return Arena(plan.size, plan.offsets, plan.waits)
