"""A collective of one round, begun and got by as few calls as can be: a small value's time is that of Python's calls.

In one function it does what `HostGroup` does of a round, where nothing else of the rank is under way: it puts, says that it has arrived,
closes the round where all others have arrived before (of two ranks it wakes the other where that sleeps), and then gets at once. All that
it needs is made once a room.
"""

from __future__ import annotations

from .rounds import ROOMS, Action, Collective, HostGroup, Rounds


class SingleRound(Collective):
    """A collective of one round which gives this rank something."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        super().__init__(group, rounds)
        self._actions: list[tuple[Action, Action, Action] | None] = [None] * ROOMS
        self._number = 0
        """The round, where it was begun with nothing else under way, else 0."""
        self._own, self._cells, self._closed, self._open = group.own, group.cells, group.closed.cell, group.open
        self._fence = group.parking.fence
        self._word = group.parking.word(group.others[0]) if len(group.others) == 1 else None

    def begin(self) -> Collective:
        group, open_rounds, word, closed = self.group, self._open, self._word, self._closed
        if open_rounds or group.unput or group.sending:
            self._number = 0
            return super().begin()
        number = self._number = group.begun + 1
        turn = number % ROOMS
        put, close, get = self._actions[turn] or self._bound(turn)
        self.done = False
        open_rounds.append((number, number, self))
        group.begun = number
        put()
        group.put = number
        self._own[0] = number
        self._fence()
        if word is not None:
            if word[0] or word[1]:
                group.wake()
            if closed[0] < number:
                return self
        else:
            for cell in self._cells:
                if cell[0] < number:
                    return self
            close()
            closed[0] = number
            self._fence()
            group.wake()
        get()
        open_rounds.clear()
        group.got = number
        self.done = True
        return self

    def Test(self) -> bool:
        group, number = self.group, self._number
        if self.done or number != group.put or not number:
            return super().Test()
        if self._closed[0] < number and not group.is_closed(number):
            return False
        _, _, get = self._actions[number % ROOMS] or self._bound(number % ROOMS)
        get()
        self._open.popleft()
        group.got = number
        self.done = True
        return True

    def _bound(self, turn: int) -> tuple[Action, Action, Action]:
        put, close, get = self.rounds.put(0, turn), self.rounds.close(0, turn), self.rounds.get(0, turn)
        assert get is not None
        found = self._actions[turn] = put or (lambda: None), close or (lambda: None), get
        return found


def collective_of(group: HostGroup, rounds: Rounds) -> Collective:
    """What begins the rounds, and is waited for."""
    return SingleRound(group, rounds) if rounds.count == 1 and rounds.takes else Collective(group, rounds)
