"""Where values that cross segments lie: one arena, shared by values whose lives do not meet.

A value lives from the step that makes it, or posts its receive, to the last step that reads it, and beyond while a send of it is
in flight. Slots are given in the order of births, each at the lowest place that is free. Where the arena would have to grow, the
slot of a value with a send in flight may be taken: then the plan says that this step first waits for that send. Only sends issued
before the previous step are taken, so that a send has had time to go while something was computed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from partc.runtime.artifact.tensors.tensor import ALIGNMENT


@dataclass(frozen=True)
class Lifetime:
    """A value's bytes and life in step numbers: made in `born`, read last in `died`, sent in the steps `sends`."""

    name: str
    bytes: int
    born: int
    died: int
    sends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arena:
    """The plan: the arena's size, the offset of each value, and by step the sends to wait for before it."""

    bytes: int
    offsets: dict[str, int]
    waits: dict[int, list[int]]


@dataclass
class _Holder:
    offset: int
    size: int
    life: Lifetime


@dataclass
class _Plan:
    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    waits: dict[int, list[int]] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    held: list[_Holder] = field(default_factory=list)
    """By rising offsets."""
    cleared: int | None = None
    """The step at which those that had ended were last left out."""

    def in_flight(self, life: Lifetime) -> list[int]:
        return [send for send in life.sends if send not in self.waited]

    def place(self, life: Lifetime) -> None:
        if self.cleared != life.born:
            self.held = [one for one in self.held if one.life.died >= life.born or self.in_flight(one.life)]
            self.cleared = life.born
        size = -(-life.bytes // ALIGNMENT) * ALIGNMENT
        offset = _lowest(self.held, size)
        if offset + size > self.size:
            offset = self._taken(life, size, offset)
        self.offsets[life.name] = offset
        self.size = max(self.size, offset + size)
        bisect.insort(self.held, _Holder(offset, size, life), key=lambda one: one.offset)

    def _taken(self, life: Lifetime, size: int, otherwise: int) -> int:
        """A place within the arena that waiting for the fewest, oldest sends gives; else `otherwise`."""
        idle = [one for one in self.held if one.life.died < life.born and max(one.life.sends) < life.born - 1]
        idle.sort(key=lambda one: max(one.life.sends))
        for count in range(1, len(idle) + 1):
            gone = [id(one) for one in idle[:count]]
            offset = _lowest([one for one in self.held if id(one) not in gone], size)
            if offset + size <= self.size:
                overlapped = [
                    one for one in idle[:count] if one.offset < offset + size and offset < one.offset + one.size
                ]
                sends = sorted({send for one in overlapped for send in self.in_flight(one.life)})
                self.waits.setdefault(life.born, []).extend(sends)
                self.waited.update(sends)
                self.held = [one for one in self.held if one not in overlapped]
                self.cleared = None  # what waits for these sends has ended, too
                return offset
        return otherwise


def assign(lives: Sequence[Lifetime]) -> Arena:
    """An arena in which no two values that live at the same time overlap. Values of no bytes have offset 0."""
    plan = _Plan()
    for life in sorted(lives, key=lambda one: one.born):
        if life.bytes:
            plan.place(life)
        else:
            plan.offsets[life.name] = 0
    return Arena(plan.size, plan.offsets, plan.waits)


def _lowest(held: Sequence[_Holder], size: int) -> int:
    """The lowest offset at which `size` bytes are free between holders in order of offsets."""
    offset = 0
    for one in held:
        if offset + size <= one.offset:
            break
        offset = max(offset, one.offset + one.size)
    return offset
