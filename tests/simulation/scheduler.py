"""Ranks as threads of which exactly one runs at a time, in an order and on a clock that a seed decides.

A thread runs until it reaches a switching point. There the seed says whether it goes on, and if not, which thread that is able to run
does. Time is virtual: it passes a little at each switching point, and jumps to the next event where nobody is able to run. So a run of
the same jobs with the same seed is the same run, step by step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Lock, Thread
from typing import Any, Protocol

STEP = 1e-6
"""Seconds that pass at a switching point."""
LONGEST_RUN = 300_000
"""Switching points after which a run counts as one that never ends."""


class Killed(BaseException):
    """The rank is gone: what its thread unwinds through no longer counts."""


class Endless(BaseException):
    """A run has passed more switching points than any that ends."""


class Waiter(Protocol):
    """What a rank waits for."""

    def ready(self) -> bool:
        """Whether the wait is over."""
        ...


@dataclass
class Choices:
    """The decisions of a run, made by its seed; all after the first `limit` are 0, so that a short list of them can be looked for."""

    random: Random
    limit: int | None = None
    made: int = 0

    def number(self, below: int) -> int:
        """One of 0 to `below` - 1."""
        self.made += 1
        value = int(self.random.random() * below)
        return value if self.limit is None or self.made <= self.limit else 0

    def chance(self, probability: float) -> bool:
        """True as often as that."""
        self.made += 1
        value = self.random.random() < probability
        return value and (self.limit is None or self.made <= self.limit)

    def seconds(self, longest: float) -> float:
        """A time of at most `longest`."""
        self.made += 1
        value = self.random.random() * longest
        return value if self.limit is None or self.made <= self.limit else 0.0


@dataclass(frozen=True)
class Outcome:
    """What a rank's job gave or raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass
class Scheduler:
    """The threads of the ranks, kept from run to run."""

    size: int
    choices: Choices = field(default_factory=lambda: Choices(Random(0)))
    switches: float = 0.0
    """How often a switching point hands over to another rank."""
    stuck: Callable[[], None] = lambda: None
    """Called where every rank waits and nothing is under way; it must make some wait end."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self._batons = [Lock() for _ in range(self.size)]
        self._over = Lock()
        for lock in (*self._batons, self._over):
            lock.acquire()
        self._jobs: list[Callable[[], Any] | None] = [None] * self.size
        self._outcomes: list[Outcome | None] = [None] * self.size
        self.waiting: list[Waiter | None] = [None] * self.size
        self._events: list[tuple[float, int, Callable[[], None], bool]] = []
        self._count = self._real = self._points = 0
        self._threads = [Thread(target=self._work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """What each rank's job gives, when all have ended."""
        self._jobs, self._outcomes = list(jobs), [None] * self.size
        self.waiting = [None] * self.size
        self._events.clear()
        self.now, self._real, self._points = 0.0, 0, 0
        self._batons[self._pick()].release()
        self._over.acquire()
        outcomes, self._outcomes, self._jobs = self._outcomes, [None] * self.size, [None] * self.size
        return [outcome or Outcome() for outcome in outcomes]

    def close(self) -> None:
        """Ends the threads."""
        self._jobs = [None] * self.size
        for baton, thread in zip(self._batons, self._threads, strict=True):
            baton.release()
            thread.join()

    def running(self) -> list[int]:
        """The ranks whose jobs have not ended."""
        return [rank for rank in range(self.size) if self._outcomes[rank] is None]

    def after(self, seconds: float, act: Callable[[], None], idle: bool = False) -> None:
        """Have something happen later; an `idle` event, such as a report, does not keep ranks from being stuck."""
        self._count += 1
        self._real += not idle
        heapq.heappush(self._events, (self.now + seconds, self._count, act, idle))

    def pause(self, rank: int) -> None:
        """A switching point of the rank that runs."""
        self.now += STEP
        self._points += 1
        if self._points > LONGEST_RUN:
            raise Endless(f"rank {rank}: {LONGEST_RUN} switching points")
        while self._events and self._events[0][0] <= self.now:
            self._fire()
        if self.choices.chance(self.switches):
            self._switch(rank)

    def block(self, rank: int, waiter: Waiter) -> None:
        """Wait; other ranks run meanwhile."""
        self.waiting[rank] = waiter
        while not waiter.ready():
            self._switch(rank)
        self.waiting[rank] = None

    def _switch(self, rank: int) -> None:
        other = self._pick()
        if other != rank:
            self._batons[other].release()
            self._batons[rank].acquire()

    def _pick(self) -> int:
        while True:
            able = [
                rank
                for rank in range(self.size)
                if self._outcomes[rank] is None and ((waiter := self.waiting[rank]) is None or waiter.ready())
            ]
            if able:
                return able[self.choices.number(len(able))] if len(able) > 1 else able[0]
            if self._real:
                self._fire()
            else:
                self.stuck()

    def _fire(self) -> None:
        time, _, act, idle = heapq.heappop(self._events)
        self._real -= not idle
        self.now = max(self.now, time)
        act()

    def _work(self, rank: int) -> None:
        while True:
            self._batons[rank].acquire()
            job = self._jobs[rank]
            if job is None:
                return
            try:
                outcome = Outcome(job())
            except BaseException as error:
                outcome = Outcome(error=error)
            self._outcomes[rank] = outcome
            if self.running():
                self._batons[self._pick()].release()
            else:
                self._over.release()
