"""Simulates a step of all ranks: each performs its actions in order, with one clock for computation and one for communication.

    compute    takes its seconds of the clock of computation
    send       leaves at once: the message arrives when those sent before it have left, and it has travelled
    receive    waits for the message
    begin      the collective begins once all of its ranks have begun it, and what these have under way is over
    finish     waits for its end, and does what of it did not go on by itself

Ranks that do the same, with others that do the same, are one class, played once: its time is that of each of them. Where ranks compute at
the same time on fewer cores, each takes longer in proportion. The critical path leads from the end of the step back to its begin, from each
wait to what it waited for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Key: TypeAlias = tuple[int, tuple[int, ...]]
"""A message or a collective: its tag, and the classes that take part."""


@dataclass(frozen=True)
class Action:
    """What a rank does, and the seconds that it computes meanwhile.

    `what` is the action as traces name it, `path` the module that it is of, `task` the task of a pipeline.
    """

    what: str
    path: str = ""
    task: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Compute(Action):
    """A computation: its operations, two for each multiply-add, and of one of several modules the seconds of each."""

    operations: float = 0.0
    modules: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class Communicate(Action):
    """One end of a message or of a collective: its tag and op, the seconds that it is under way, and the bytes that the rank gives.

    `group`: that of the list that the rank is in: of a collective, where it is not of all ranks, or of the pairs of many messages.
    """

    tag: int
    op: str = ""
    group: str = ""
    travel: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Send(Communicate):
    """A message leaves to the rank `peer`."""

    op: str = "Send"
    peer: int


@dataclass(frozen=True, kw_only=True)
class Receive(Communicate):
    """The wait for a message of the rank `peer`."""

    op: str = "Recv"
    peer: int


@dataclass(frozen=True, kw_only=True)
class Begin(Communicate):
    """A rank begins a collective."""


@dataclass(frozen=True, kw_only=True)
class Finish(Communicate):
    """The wait for the end of a collective."""


@dataclass(frozen=True)
class Class:
    """Ranks that do the same. `others`: by tag the classes that take part in the message or collective."""

    ranks: tuple[int, ...]
    actions: Sequence[Action]
    others: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Interval:
    """An action as it was played; `cause`: the class and place of what it began behind, None at the begin of the step.

    A message and a collective are intervals between two actions.
    """

    action: Action
    begin: float
    end: float
    cause: tuple[int, int] | None


@dataclass(frozen=True)
class Played:
    """A step: its seconds, and by class the intervals, and the seconds of computation and of communication under way."""

    classes: Sequence[Class]
    seconds: float
    intervals: Sequence[Sequence[Interval]]
    busy: Sequence[float]
    communication: Sequence[float]
    critical: Sequence[tuple[int, Action, float]]
    """From the begin of the step to its end: the class, what it did, and for how long."""


@dataclass
class _Event:
    """A message or a collective: who has begun it and when, and its end, once that is known."""

    ready: dict[int, float] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    travel: float = 0.0
    end: float = math.inf
    cause: tuple[int, int] | None = None
    begin: float = 0.0


class _Player:
    def __init__(self, classes: Sequence[Class], cores: int, wake: float) -> None:
        self.classes, self.cores, self.awake = classes, cores, wake
        count = len(classes)
        self.at = [0] * count
        self.clock = [0.0] * count
        self.link = [0.0] * count
        self.communication = [0.0] * count
        self.intervals: list[list[Interval]] = [[] for _ in range(count)]
        self.last: list[tuple[int, int] | None] = [None] * count
        self.events: dict[Key, _Event] = {}
        self.waiting: dict[Key, list[int]] = {}
        self.queue: list[tuple[float, int, int]] = []
        self.turns = [0] * count
        self.running: dict[int, float] = {}
        """Maps each class that computes to the seconds that it has left."""
        self.begun = [0.0] * count
        self.speed, self.since = 1.0, 0.0
        self.shared = 0 < cores < sum(len(one.ranks) for one in classes)

    def play(self) -> Played:
        for k in range(len(self.classes)):
            self.go_on(k)
        while self.queue:
            now, k, turn = heapq.heappop(self.queue)
            if turn != self.turns[k]:
                continue
            self.clock[k] = now
            if k in self.running:
                self.complete(k, now - self.took(k, now))
            self.go_on(k)
        if stuck := [k for k, one in enumerate(self.classes) if self.at[k] < len(one.actions)]:
            one = self.classes[stuck[0]]
            raise ValueError(f"rank {one.ranks[0]} waits without end in {one.actions[self.at[stuck[0]]].what}")
        seconds = max(self.clock, default=0.0)
        busy = [sum(one.action.seconds for one in some) for some in self.intervals]
        return Played(self.classes, seconds, self.intervals, busy, self.communication, self.critical())

    def go_on(self, k: int) -> None:
        """Does what a class does now, until it computes or waits."""
        one = self.classes[k]
        while self.at[k] < len(one.actions):
            action = one.actions[self.at[k]]
            if isinstance(action, Receive | Finish) and not self.is_over(k, action.tag):
                return
            if action.seconds > 0:
                self.compute(k, action.seconds)
                return
            self.complete(k, self.clock[k])

    def is_over(self, k: int, tag: int) -> bool:
        """Whether what a class waits for is over; if not, it goes on then."""
        key = self.key(k, tag)
        event = self.events.get(key)
        if event is None or event.end == math.inf:
            self.waiting.setdefault(key, []).append(k)
            return False
        if event.end > self.clock[k]:
            self.last[k] = event.cause
            self.later(k, event.end + self.awake)
            return False
        return True

    def later(self, k: int, when: float) -> None:
        """Lets a class go on at a time; what was to come before is void."""
        self.turns[k] += 1
        heapq.heappush(self.queue, (when, k, self.turns[k]))

    def compute(self, k: int, seconds: float) -> None:
        """Begins a computation; where cores are shared the others then take longer."""
        now = self.clock[k]
        self.begun[k] = now
        if not self.shared:
            self.running[k] = seconds
            self.later(k, now + seconds)
            return
        self.settle(now)
        self.running[k] = seconds
        self.share(now)

    def took(self, k: int, now: float) -> float:
        """Ends a computation: the seconds by the clock."""
        if self.shared:
            self.settle(now)
        del self.running[k]
        if self.shared:
            self.share(now)
        return now - self.begun[k]

    def settle(self, now: float) -> None:
        """Takes what was computed up to now from what is left."""
        for one in self.running:
            self.running[one] -= (now - self.since) * self.speed
        self.since = now

    def share(self, now: float) -> None:
        """Divides the cores among those that compute, and says when each of them ends at that speed."""
        wanted = sum(len(self.classes[one].ranks) for one in self.running)
        self.speed = min(1.0, self.cores / wanted) if wanted else 1.0
        for one, left in self.running.items():
            self.later(one, now + max(0.0, left) / self.speed)

    def complete(self, k: int, begin: float) -> None:
        """Ends the action at which a class is, and begins what it sends."""
        one = self.classes[k]
        action, now = one.actions[self.at[k]], self.clock[k]
        self.intervals[k].append(Interval(action, begin, now, self.last[k]))
        place = k, len(self.intervals[k]) - 1
        self.last[k] = place
        self.at[k] += 1
        if isinstance(action, Send):
            event = self.events.setdefault(self.key(k, action.tag), _Event())
            event.begin = max(now, self.link[k])
            event.end = self.link[k] = event.begin + action.travel
            event.cause = place
            self.communication[k] += action.travel
            self.wake(self.key(k, action.tag))
        elif isinstance(action, Begin):
            key = self.key(k, action.tag)
            event = self.events.setdefault(key, _Event())
            event.ready[k], event.places[k] = max(now, self.link[k]), place[1]
            event.travel = max(event.travel, action.travel)
            if len(event.ready) == len(key[1]):
                last = max(event.ready, key=lambda other: event.ready[other])
                event.begin = event.ready[last]
                event.end = event.begin + event.travel
                event.cause = last, event.places[last]
                for other in key[1]:
                    self.link[other] = max(self.link[other], event.end)
                    self.communication[other] += event.travel
                self.wake(key)

    def wake(self, key: Key) -> None:
        event = self.events[key]
        for k in self.waiting.pop(key, []):
            self.last[k] = event.cause
            self.later(k, event.end + self.awake)

    def key(self, k: int, tag: int) -> Key:
        return tag, self.classes[k].others[tag]

    def critical(self) -> list[tuple[int, Action, float]]:
        """From the class that ends last back to the begin of the step."""
        if not any(self.intervals):
            return []
        last = max(range(len(self.classes)), key=lambda k: self.clock[k])
        at: tuple[int, int] | None = (last, len(self.intervals[last]) - 1)
        until, way = self.clock[last], list[tuple[int, Action, float]]()
        while at is not None:
            interval = self.intervals[at[0]][at[1]]
            if until > interval.end:  # a message or a collective was under way
                way.append((at[0], interval.action, until - interval.end))
            if interval.end > interval.begin:
                way.append((at[0], interval.action, interval.end - interval.begin))
            until = interval.begin
            at = interval.cause
        return way[::-1]


def play(classes: Sequence[Class], cores: int = 0, wake: float = 0.0) -> Played:
    """A step of these classes; ValueError where ranks wait for each other without end.

    `cores`: those that they share, 0 for enough; `wake`: seconds until a rank goes on that has waited.
    """
    return _Player(classes, cores, wake).play()
