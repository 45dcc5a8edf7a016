"""Collectives of one list of ranks of a host, as rounds in shared memory.

In a round each rank puts something into a room of its own, says that it has arrived, and when all have arrived gets what it wants from
the rooms of all. A collective is one round, or several where its values are larger than a room; an AllReduce that is reduced in shares has
two rounds for each chunk (`collectives.py`).

Each rank has a counter of arrivals and four rooms, which take turns. A rank puts round n when it has got round n - 2, hence when all have
arrived in it; each of these had then got round n - 4, which had the same room: no rank reads there any more. So a rank may begin two
rounds before it waits for any; what is begun beyond that is put when earlier rounds are over. No call here waits: `advance` does what
can be done.

The rank that arrives last closes the round: it raises the number of rounds in which all have arrived, to which the others look and on
which they sleep, and one call wakes these. Where all want the same (`Rounds.close`), it makes that before, in one more room, and the others
copy it. As each stores its arrival before it looks at the others' (`RankWait.fence`), at least one of several that arrive at a time sees
that all have come. Where two see it both close the round, with the same bytes, which each makes in memory of its own and then copies. None
of them can be late for a later round, in which it has not arrived. A rank that is woken, or looks after its time, and finds the round
open though all have arrived (who arrived last was interrupted) closes it for itself alone (`close_own`). Of two ranks each looks at the
arrivals of the other, and sleeps on these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Bytes

from ...job.parking import LINE, Cell, Count, RankWait
from .segment import Segment, address_of

Action = Callable[[], object]
ROOM = 1 << 19
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

    def close(self, index: int, turn: int) -> Action | None:
        """What makes of the rooms of all that which every rank gets, into the room in common; it may run on several ranks."""
        return None

    def get(self, index: int, turn: int) -> Action | None:
        """What reads the rooms of a turn when all have arrived."""
        raise NotImplementedError


class SharedRooms:
    """Arrivals and rooms of the ranks of one list, `places` of the host; by turn the last room is that in common.

    `count` makes a number on which ranks sleep of its line, and the address of that.
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,
        places: Sequence[int],
        own: int,
        count: Callable[[memoryview, int], Count],
    ) -> None:
        ranks = len(places)
        self.places, self.own = places, places.index(own)
        memory = segment.map(offset, self.size(ranks))
        lines = [memory[at : at + LINE] for at in range(0, LINE * (ranks + 1), LINE)]
        self.cells = [line.cast("q") for line in lines[:ranks]]
        self.closed, self.raised = (count(lines[at], address_of(memory) + LINE * at) for at in closing(ranks, self.own))
        start = _after_lines(ranks)
        self.rooms: list[list[Bytes]] = [
            [np.frombuffer(memory, np.uint8, ROOM, start + (at * ROOMS + turn) * ROOM) for at in range(ranks + 1)]
            for turn in range(ROOMS)
        ]
        self.made: Bytes = np.empty(ROOM, np.uint8)
        """Memory of this rank, in which it makes what goes into a room in common."""

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes for so many ranks."""
        return _after_lines(ranks) + (ranks + 1) * ROOMS * ROOM


def closing(ranks: int, own: int) -> tuple[int, int]:
    """The lines of the number of closed rounds at which a rank looks, and of that which it raises: arrivals are the first lines."""
    return (1 - own, own) if ranks == 2 else (ranks, ranks)


def _after_lines(ranks: int) -> int:
    return -(-LINE * (ranks + 1) // 4096) * 4096


class Collective:
    """A collective that may be begun again and again, each time after the wait for it; it is its own request."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        self.group, self.rounds = group, rounds
        self.done = False
        """Whether it is over, as far as this rank has looked."""

    def begin(self) -> Collective:
        """Begins it."""
        self.done = False
        self.group.begin(self)
        return self

    def Test(self) -> bool:
        """Whether it is over."""
        if not self.done:
            self.group.advance()
        return self.done


class HostGroup:
    """One rank's end of the collectives of a list.

    `cells`: arrivals by index; `own` is the index of its own, `others` are other places. `closed`: the number of rounds in which all have
    arrived; `raised`: that which this rank raises.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        own: int,
        others: Sequence[int],
        parking: RankWait,
        closed: Count,
        raised: Count,
    ) -> None:
        self.own = cells[own]
        self.cells = [cell for index, cell in enumerate(cells) if index != own]
        """The others' arrivals."""
        self.others, self.parking = others, parking
        self.closed, self._raised = closed, raised
        self._closed, self._closed_here = closed.cell, 0
        self._are_two = len(cells) == 2
        self.unput: dict[HostGroup, None] = {}
        """The groups of the rank with a round that is begun and not put, for which others may wait."""
        self.sending: Collection[int] = ()
        """The peers of the rank for which messages wait."""
        self.begun = self.put = self.got = 0
        """Numbers of the last round that was begun, put, and got."""
        self.open: deque[tuple[int, int, Collective]] = deque()
        """The first and the last round of each collective that is begun and not got."""

    def begin(self, one: Collective) -> None:
        """Begins a collective, without waiting."""
        first = self.begun + 1
        self.begun += one.rounds.count
        self.open.append((first, self.begun, one))
        self.unput[self] = None
        self.advance()

    def advance(self) -> None:
        """Gets and puts the rounds that it can."""
        more = True
        while more:
            if self.got < self.put and self.is_closed(self.got + 1):
                self._get(self.got + 1)
            else:
                more = self.put < self.begun and self._put(self.put + 1)

    def is_closed(self, number: int) -> bool:
        """Whether all have arrived in a round, as far as this rank may know."""
        return self._closed[0] >= number or self._closed_here >= number

    def close_own(self) -> None:
        """Closes the next round for this rank alone where all have arrived in it and none has closed it."""
        number = self.got + 1
        if self.put >= number > self._closed[0]:
            first, _, one = self.open[0]
            self._closed_here = number if self._made(number, first, one.rounds) else self._closed_here

    def wake(self) -> None:
        """Wakes those that sleep until a round is closed, or for anything else, after a fence."""
        self.parking.wake(self.others, self._raised)

    def wake_all(self) -> None:
        """Wakes all that sleep until a round is closed."""
        self._raised.wake()

    def _made(self, number: int, first: int, rounds: Rounds) -> bool:
        """Whether all have arrived in a round of a collective that began with the first; then what all want is made."""
        for cell in self.cells:
            if cell[0] < number:
                return False
        action = rounds.close(number - first, number % ROOMS)
        if action is not None:
            action()
        return True

    def _get(self, number: int) -> None:
        """Gets a round that is closed."""
        first, last, one = self.open[0]
        action = one.rounds.get(number - first, number % ROOMS)
        if action is not None:
            action()
        self.got = number
        if number == last:
            self.open.popleft()
            one.done |= one.rounds.takes

    def _put(self, number: int) -> bool:
        """Puts a round, where its turn has come."""
        first, last, one = next(each for each in self.open if number <= each[1])
        rounds = one.rounds
        if self.got < number - 1 and self.got < number - rounds.ahead(number - first):
            return False
        action = rounds.put(number - first, number % ROOMS)
        if action is not None:
            action()
        self.put = number
        if number == self.begun:
            self.unput.pop(self, None)
        self.own[0] = number
        self.parking.fence()
        if self._are_two:
            self.wake()
        elif self._made(number, first, rounds):
            self._closed[0] = number
            self.parking.fence()
            self.wake()
        if number == last:
            one.done |= not rounds.takes
        return True
