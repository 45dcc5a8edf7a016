"""Collectives of one list of ranks of a host, as rounds in shared memory.

In a round each rank puts something into a room of its own, says that it has arrived, and when all have arrived gets what it wants from
the rooms of all. A collective is one round, or several where its values are larger than a room; an AllReduce that is reduced in shares has
two rounds for each chunk (`collectives.py`).

Each rank has a counter of arrivals and four rooms, which take turns. A rank puts round n when it has got round n - 2, hence when all have
arrived in it; each of these had then got round n - 4, which had the same room: no rank reads there any more. So a rank may begin two
rounds before it waits for any; what is begun beyond that is put when earlier rounds are over. No call here waits: `advance` does what
can be done.

The rank that arrives last wakes those that sleep. As each stores its arrival before it looks at the others' (`Parking.fence`), at least
one of several that arrive at a time sees that all have come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Bytes

from ...job.parking import LINE, Cell, Parking
from .segment import Segment

Action = Callable[[], object]
ROOM = 1 << 18
"""Bytes of a room."""
ROOMS = 4
_AHEAD = 2


class Rounds:
    """What a collective does in its rounds."""

    count: int
    takes: bool = True
    """Whether this rank gets anything."""

    def ahead(self, index: int) -> int:
        """How many rounds before it a round needs to be over on this rank: two, or one where it puts what it got in that one."""
        return _AHEAD

    def put(self, index: int, turn: int) -> Action | None:
        """What writes to the own room of a turn in a round."""
        raise NotImplementedError

    def get(self, index: int, turn: int) -> Action | None:
        """What reads the rooms of a turn when all have arrived."""
        raise NotImplementedError


class SharedRooms:
    """Arrivals and rooms of the ranks of one list, `places` of the host."""

    def __init__(self, segment: Segment, offset: int, places: Sequence[int], own: int) -> None:
        count = len(places)
        self.places, self.own = places, places.index(own)
        memory = segment.map(offset, self.size(count))
        self.cells = [memory[at : at + LINE].cast("q") for at in range(0, LINE * count, LINE)]
        start = _after_lines(count)
        self.rooms: list[list[Bytes]] = [
            [np.frombuffer(memory, np.uint8, ROOM, start + (rank * ROOMS + turn) * ROOM) for rank in range(count)]
            for turn in range(ROOMS)
        ]

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes for so many ranks."""
        return _after_lines(ranks) + ranks * ROOMS * ROOM


def _after_lines(ranks: int) -> int:
    return -(-LINE * ranks // 4096) * 4096


@dataclass(eq=False)
class Collective:
    """A collective that may be begun again and again, each time after the wait for it; it is its own request."""

    group: HostGroup
    rounds: Rounds
    last: int = 0

    def begin(self) -> Collective:
        """Begins it."""
        self.group.begin(self)
        return self

    def Test(self) -> bool:
        """Whether it is over."""
        group, rounds = self.group, self.rounds
        if (group.got if rounds.takes else group.put) < self.last:
            group.advance()
        return (group.got if rounds.takes else group.put) >= self.last


class HostGroup:
    """One rank's end of the collectives of a list. `cells`: arrivals by index; `own` is its own, `others` are other places.

    `unput`: of all groups of the rank those with a round that is begun and not put, for which others may wait.
    """

    def __init__(
        self, cells: Sequence[Cell], own: int, others: Sequence[int], parking: Parking, unput: dict[HostGroup, None]
    ) -> None:
        self._own = cells[own]
        self._cells = [cell for index, cell in enumerate(cells) if index != own]
        self._others = others
        self._parking, self._unput = parking, unput
        self.begun = self.put = self.got = 0
        """Numbers of the last round that was begun, put, and got."""
        self._open: deque[tuple[int, int, Rounds]] = deque()

    def begin(self, one: Collective) -> None:
        """Begins a collective, without waiting."""
        first = self.begun + 1
        one.last = self.begun = self.begun + one.rounds.count
        self._open.append((first, one.last, one.rounds))
        self.advance()
        if self.put < self.begun:
            self._unput[self] = None

    def advance(self) -> None:
        """Gets and puts the rounds that it can."""
        more = True
        while more:
            more = self.got < self.put and self._get(self.got + 1)
            more = more or (self.put < self.begun and self._put(self.put + 1))

    def _arrived(self, number: int) -> bool:
        return all(cell[0] >= number for cell in self._cells)

    def _get(self, number: int) -> bool:
        """Gets a round, where all have arrived."""
        if not self._arrived(number):
            return False
        first, last, rounds = self._open[0]
        action = rounds.get(number - first, number % ROOMS)
        if action is not None:
            action()
        self.got = number
        if number == last:
            self._open.popleft()
        return True

    def _put(self, number: int) -> bool:
        """Puts a round, where its turn has come."""
        first, rounds = next((first, rounds) for first, last, rounds in self._open if number <= last)
        if number - rounds.ahead(number - first) > self.got:
            return False
        action = rounds.put(number - first, number % ROOMS)
        if action is not None:
            action()
        self.put = number
        if number == self.begun and self._unput:
            self._unput.pop(self, None)
        self._own[0] = number
        self._parking.fence()
        if self._arrived(number):
            self._parking.wake(self._others)
        return True
