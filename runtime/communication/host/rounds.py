"""Collectives of one list of ranks of a host, as rounds in shared memory.

In a round each rank puts bytes into a room of its own, signals that it has arrived, and when all have arrived gets the bytes that it needs
from the rooms of all. A collective is one round, or several where its values are larger than a room; an AllReduce that is reduced in shares
has two rounds for each chunk (`collectives.py`).

Each rank has a counter of arrivals and four rooms, which take turns. A rank puts round n when it has got round n - 2, hence when all have
arrived in that round; each of these had then got round n - 4, which had the same room: no rank reads that room any more. So a rank may
begin two rounds before it waits for any; rounds begun beyond these are put when earlier rounds are over. No call here waits: `advance` does
everything that is possible without waiting.

The rank that arrives last closes the round: it raises the number of rounds in which all have arrived, which the other ranks read and on
which they sleep, and one call wakes these. Where all want the same result (`Rounds.close`), it first computes that result in one more room,
and the others copy it. Each rank stores its arrival before it reads those of the others (`RankWait.fence`), so that of several ranks that
arrive at a time at least one sees that all have come. If two see it both close the round, with the same bytes, which each computes in
memory of its own and then copies. Neither can disturb a later round, because it has not arrived in that one. A rank that is woken, or
checks after its time, may find the round open though all have arrived, because the last one to arrive was interrupted; then it closes the
round for itself alone (`close_own`). Of two ranks each reads the arrivals of the other, and sleeps on these.
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
    """The actions of a collective in its rounds."""

    count: int
    takes: bool = True
    """Whether this rank receives anything."""

    def ahead(self, index: int) -> int:
        """Returns k: a round is put once the k-th round before it is over on this rank. 2, or 1 if it puts the result of that round."""
        return _AHEAD

    def put(self, index: int, turn: int) -> Action | None:
        """Returns the action that writes to the rank's own room of a turn in a round."""
        raise NotImplementedError

    def close(self, index: int, turn: int) -> Action | None:
        """Returns the action that computes the result of all ranks, from all rooms into the common room; it may run on several ranks."""
        return None

    def get(self, index: int, turn: int) -> Action | None:
        """Returns the action that reads the rooms of a turn when all have arrived."""
        raise NotImplementedError


class SharedRooms:
    """The arrivals and rooms of the ranks of one list; in each turn the last room is common to all.

    `places`: the ranks' places on the host. `count` makes a number on which ranks can sleep from its line of memory and the line's address.
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
        """Memory of this rank, in which it computes the bytes for a common room."""

    @staticmethod
    def size(ranks: int) -> int:
        """Returns the bytes for this number of ranks."""
        return _after_lines(ranks) + (ranks + 1) * ROOMS * ROOM


def closing(ranks: int, own: int) -> tuple[int, int]:
    """Returns two lines: that of the number of closed rounds which a rank reads, and that which it raises. Arrivals are the first lines."""
    return (1 - own, own) if ranks == 2 else (ranks, ranks)


def _after_lines(ranks: int) -> int:
    return -(-LINE * (ranks + 1) // 4096) * 4096


class Collective:
    """A collective that may be begun again after each wait for it; it is its own request."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        self.group, self.rounds = group, rounds
        self.done = False
        """Whether it is complete, as far as this rank has checked."""

    def begin(self) -> Collective:
        """Begins the collective."""
        self.done = False
        self.group.begin(self)
        return self

    def Test(self) -> bool:
        """Makes progress, and returns whether the collective is complete."""
        if not self.done:
            self.group.advance()
        return self.done


class HostGroup:
    """One rank's end of the collectives of a list.

    `cells`: the ranks' arrivals; `own` is this rank's index in it, `others` are the other ranks' places. `closed`: the number of rounds in
    which all have arrived; `raised`: the number that this rank raises when it closes a round.
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
        """The other ranks' arrivals."""
        self.others, self.parking = others, parking
        self.closed, self._raised = closed, raised
        self._closed, self._closed_here = closed.cell, 0
        self._are_two = len(cells) == 2
        self.unput: dict[HostGroup, None] = {}
        """The groups of the rank with a round that is begun and not put, for which others may wait."""
        self.sending: Collection[int] = ()
        """The peers for which the rank's messages wait."""
        self.begun = self.put = self.got = 0
        """The numbers of the last rounds that were begun, put, and got."""
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
        """Gets and puts all rounds that it can."""
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
        """Closes the next round for this rank alone, if all have arrived in it and no rank has closed it."""
        number = self.got + 1
        if self.put >= number > self._closed[0]:
            first, _, one = self.open[0]
            self._closed_here = number if self._made(number, first, one.rounds) else self._closed_here

    def wake(self) -> None:
        """Wakes the ranks that sleep until a round is closed or for another reason; call it after a fence."""
        self.parking.wake(self.others, self._raised)

    def wake_all(self) -> None:
        """Wakes all ranks that sleep until a round is closed."""
        self._raised.wake()

    def _made(self, number: int, first: int, rounds: Rounds) -> bool:
        """Returns whether all have arrived in a round, whose common result it then computes. `first`: the collective's first round."""
        for cell in self.cells:
            if cell[0] < number:
                return False
        action = rounds.close(number - first, number % ROOMS)
        if action is not None:
            action()
        return True

    def _get(self, number: int) -> None:
        """Gets a round that is closed."""
        first, last, started = self.open[0]
        action = started.rounds.get(number - first, number % ROOMS)
        if action is not None:
            action()
        self.got = number
        if number == last:
            self.open.popleft()
            started.done |= started.rounds.takes

    def _put(self, number: int) -> bool:
        """Puts a round, unless an earlier one must be over first; returns whether it has."""
        first, last, started = next(each for each in self.open if number <= each[1])
        rounds = started.rounds
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
            started.done |= not rounds.takes
        return True
