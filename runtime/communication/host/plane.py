"""The data plane of one rank: messages and collectives among the ranks of its host in one segment, and one wait for both.

    some = plane.list_of((0, 1, 3))         # called by every rank of the host, in one order, also for lists without that rank
    begin = some.prepare(args)
    plane.wait(begin(), what)

While a rank waits for one request it continues everything else for which others may wait: rounds that it has not put yet, and messages.

`SingleRound` begins and gets a collective of one round with as few calls as possible, because the time of a small value is that of Python's
calls. If nothing else of the rank is under way, it does in one function what `HostGroup` does in a round: it puts, signals its arrival,
closes the round if all others have arrived (of two ranks it wakes the other if that sleeps), and then gets at once. Its actions are made
once for each room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_NAME, Bytes

from ...artifact.format import ALL_REDUCE, MAX
from ...job.parking import (
    LINE,
    LOOK,
    Futex,
    FutexCount,
    FutexWords,
    RankWait,
    ShortSpin,
    SpinTime,
    YieldTurns,
    new_fence,
)
from ..mpi_watch import Watch
from ..transport import CollectiveArgs, Vector
from .collectives import rounds_of
from .messages import Channel, HostMessages, Message
from .rounds import ROOMS, Action, Collective, HostGroup, Rounds, SharedRooms
from .segment import Segment, address_of


class SingleRound(Collective):
    """A collective of one round in which this rank receives something."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        super().__init__(group, rounds)
        self._actions: list[tuple[Action, Action, Action] | None] = [None] * ROOMS
        self._number = 0
        """The number of the round, if it was begun with nothing else under way, else 0."""
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
    """Returns the collective that runs these rounds."""
    return SingleRound(group, rounds) if rounds.count == 1 and rounds.takes else Collective(group, rounds)


_SHORT_LOOK = 1e-3
"""Seconds of a sleep where MPI must be called meanwhile, for messages of other hosts."""
HostRequest = (Collective, Message)
"""The types of requests that `wait` accepts."""


class RankList:
    """Collectives among some ranks of the host."""

    def __init__(self, rooms: SharedRooms, parking: RankWait, own_core: bool) -> None:
        self._rooms, self._own_core = rooms, own_core
        others = [place for index, place in enumerate(rooms.places) if index != rooms.own]
        self.group = HostGroup(rooms.cells, rooms.own, others, parking, rooms.closed, rooms.raised)

    def prepare(self, args: CollectiveArgs) -> Callable[[], Collective]:
        """Returns the function that begins the collective."""
        return collective_of(self.group, rounds_of(args, self._rooms, self._own_core)).begin


class DataPlane:
    """One rank's end of the data plane. `place` is its index in the host's `ranks`; `look` raises where a rank has failed."""

    def __init__(
        self,
        segment: Segment,
        futex: Futex,
        ranks: Sequence[int],
        place: int,
        own_core: bool,
        single_host: bool,
        watch: Watch,
        look: Callable[[], object],
    ) -> None:
        self._segment, self._place, self._watch, self._look, self._own_core = segment, place, watch, look, own_core
        self.places = {rank: at for at, rank in enumerate(ranks) if at != place}
        """Maps each other rank of the host to its index."""
        count = len(ranks)
        self._rank = ranks[place]
        lines = segment.map(segment.reserve(LINE * (count + 1)), LINE * (count + 1))
        look_after = LOOK if single_host else _SHORT_LOOK
        words = FutexWords(futex, lines, address_of(lines), count, look_after)

        def number(line: memoryview, address: int) -> FutexCount:
            return FutexCount(futex, line, address, look_after)

        self._number = number
        caution = ShortSpin(lines[LINE * count :].cast("d"))
        self._spin: SpinTime | None = None
        if own_core:
            with contextlib.suppress(OSError):
                self._spin = SpinTime(caution)
        self._parking = RankWait(words, place, new_fence(), self._spin, None if own_core else YieldTurns(caution))
        channels = segment.reserve(Channel.size() * count * count)

        def channel(source: int, target: int) -> Channel:
            return Channel.of(segment.map(channels + Channel.size() * (source * count + target), Channel.size()))

        self.messages = HostMessages(place, channel, self._parking)
        self._unput: dict[HostGroup, None] = {}
        """The groups with a round that is begun and not put; usually few or none, and read many times in a step."""
        self._groups: list[HostGroup] = []
        self._looks: dict[HostGroup, Callable[[], object]] = {}
        """Maps each group to the function that a rank waiting for the group calls after a sleep."""

    @property
    def under_way(self) -> bool:
        """Whether others may wait for communication that this rank has begun and continues only when it is called again."""
        return self._beside(None)

    def _beside(self, own: HostGroup | None) -> bool:
        """Whether others may wait for this rank's messages, or for its collectives of groups other than `own`."""
        return bool(self.messages.sending) or any(group is not own for group in self._unput)

    def list_of(self, ranks: Sequence[int]) -> RankList | None:
        """Reserves room for collectives among these ranks of the host; returns None on the other ranks, which must reserve it, too."""
        offset = self._segment.reserve(SharedRooms.size(len(ranks)))
        if self._rank not in ranks:
            return None
        places = [self._place if rank == self._rank else self.places[rank] for rank in ranks]
        rooms = SharedRooms(self._segment, offset, places, self._place, self._number)
        found = RankList(rooms, self._parking, self._own_core)
        found.group.unput, found.group.sending = self._unput, self.messages.sending
        self._groups.append(found.group)
        self._looks[found.group] = partial(self._look_in, found.group)
        return found

    def isend(self, data: Bytes, rank: int, tag: int) -> Message:
        """Begins to send to another rank of the host."""
        return self.messages.send(data, self.places[rank], tag)

    def irecv(self, data: Bytes, rank: int, tag: int) -> Message:
        """Begins to receive from another rank of the host."""
        return self.messages.receive(data, self.places[rank], tag)

    def _look_in(self, group: HostGroup) -> None:
        group.close_own()
        self._look()

    def progress(self) -> None:
        """Continues everything that is under way."""
        self.messages.progress()
        for group in [*self._unput]:
            group.advance()

    def wait(self, request: Collective | Message, what: Callable[[], str]) -> None:
        """Returns when the request is complete; `what` names it in reports."""
        ready, look, count, messages = request.Test, self._look, None, self.messages
        group = request.group if isinstance(request, Collective) else None
        if messages.sending or messages.expecting or (self._unput and self._beside(group)):

            def ready(test: Callable[[], bool] = request.Test) -> bool:
                self.progress()
                return test()

        elif group is not None:
            count = group.closed
        if self._parking.spins(ready, count):
            return
        if group is not None:
            look = self._looks[group]
        self._watch.begin(what)
        try:
            self._parking.wait(ready, look, count)
        finally:
            self._watch.end()

    def wake_own(self) -> None:
        """Makes this rank check for failures now; called from another thread."""
        self._parking.wake_own()

    def wake_all(self) -> None:
        """Makes the other ranks check for failures now."""
        new_fence()()  # a new fence: an interrupt may have stopped the rank's own between its two calls
        self._parking.wake([*self.places.values()])
        for group in self._groups:
            group.wake_all()

    def close(self) -> None:
        """Frees the memory once nothing uses it any more."""
        self._segment.close()
        if self._spin is not None:
            self._spin.close()


class HostAgreements:
    """Element-wise maxima over all ranks of a list."""

    def __init__(self, among: RankList, ranks: Sequence[int]) -> None:
        self._among, self._ranks = among, tuple(ranks)
        self._by_size: dict[int, tuple[Vector, Vector, Callable[[], Collective]]] = {}

    def begin(self, vector: Vector) -> tuple[Collective, Vector]:
        """Begins the next agreement without waiting; returns its request and its result, valid from its completion until the next begin."""
        prepared = self._by_size.get(vector.size)
        if prepared is None:
            given, agreed = np.empty_like(vector), np.empty_like(vector)
            data = given.view(np.uint8), agreed.view(np.uint8)
            args = CollectiveArgs(ALL_REDUCE, self._ranks, 0, *data, BY_NAME["int64"], MAX)
            prepared = self._by_size[vector.size] = given, agreed, self._among.prepare(args)
        given, agreed, begin = prepared
        np.copyto(given, vector)
        return begin(), agreed
