"""A collective of one round between two ranks, begun and got by as few calls as can be: a small value's time is that of Python's calls.

In one function it does what `HostGroup` does of a round, where nothing else of the rank is under way: it puts, says that it has arrived,
wakes the other rank where that sleeps, and gets at once where the other one has arrived before. All that it needs is made once a room.
"""

from __future__ import annotations

from .rounds import ROOMS, Action, Collective, HostGroup, Rounds


class PairRound(Collective):
    """A collective of two ranks and one round which gives this one something."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        super().__init__(group, rounds)
        self._actions: list[tuple[Action, Action] | None] = [None] * ROOMS
        self._number = 0
        """The round, where it was begun with nothing else under way, else 0."""
        self._own, self._other, self._open = group.own, group.closed.cell, group.open
        self._fence, self._word = group.parking.fence, group.parking.word(group.others[0])

    def begin(self) -> Collective:
        group, open_rounds, word = self.group, self._open, self._word
        if open_rounds or group.unput or group.sending:
            self._number = 0
            return super().begin()
        number = self._number = group.begun + 1
        turn = number % ROOMS
        put, get = self._actions[turn] or self._bound(turn)
        self.done = False
        open_rounds.append((number, number, self))
        group.begun = number
        put()
        group.put = number
        self._own[0] = number
        self._fence()
        if word[0] or word[1]:
            group.wake()
        if self._other[0] >= number:
            get()
            open_rounds.clear()
            group.got = number
            self.done = True
        return self

    def Test(self) -> bool:
        group, number = self.group, self._number
        if self.done or number != group.put or not number:
            return super().Test()
        if self._other[0] < number:
            return False
        _, get = self._actions[number % ROOMS] or self._bound(number % ROOMS)
        get()
        self._open.popleft()
        group.got = number
        self.done = True
        return True

    def _bound(self, turn: int) -> tuple[Action, Action]:
        put, get = self.rounds.put(0, turn), self.rounds.get(0, turn)
        assert get is not None
        found = self._actions[turn] = put or (lambda: None), get
        return found


def collective_of(group: HostGroup, rounds: Rounds) -> Collective:
    """What begins the rounds, and is waited for."""
    single = len(group.others) == 1 and rounds.count == 1 and rounds.takes
    return PairRound(group, rounds) if single else Collective(group, rounds)
