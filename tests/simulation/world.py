"""The job of simulated ranks: what is under way between them, who has failed or is gone, and what may happen to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from partc.runtime.communication.transport import stalled
from partc.runtime.errors import RankError

from .parts import Joining, Key, Meeting, Transfer, named
from .scheduler import Choices, Killed, Scheduler

What = Callable[[], str]
NOTICED = 5e-3
"""Seconds at most until the launcher sees that a rank has died, and ends the job."""


@dataclass(frozen=True)
class Weather:
    """How a run is disturbed: how often ranks change, how long messages take, how many sends wait for their receive, what poison is."""

    switches: float
    delay: float
    late: float
    rendezvous: float
    poison: int

    @staticmethod
    def of(random: Random) -> Weather:
        """One of many."""
        return Weather(
            random.choice((0.0, 0.02, 0.2, 0.5, 1.0)),
            random.choice((0.0, 2e-5, 2e-4, 2e-3)),
            random.choice((0.0, 0.1, 0.5, 1.0)),
            random.choice((0.0, 0.5, 1.0)),
            random.choice((0xFF, 0x7F)),
        )


CALM = Weather(0.0, 0.0, 0.0, 0.0, 0xFF)


@dataclass
class _Nap:
    over: bool = False

    def ready(self) -> bool:
        return self.over


class SimulatedWorld:
    """The ranks of one simulated job."""

    def __init__(self, size: int) -> None:
        self.size, self.stall = size, 30.0
        self.scheduler = Scheduler(size)
        self.scheduler.stuck = self._stuck
        self.watch: Callable[[int, str], None] = lambda rank, what: None
        """Called before each thing that a rank does, with its text; it may raise, put the rank to sleep, or kill it."""
        self.trace: list[tuple[float, int, str]] | None = None
        self.forget(CALM, Choices(Random(0)))

    def forget(self, weather: Weather, choices: Choices) -> None:
        """Begin anew: nothing under way, nobody failed."""
        self.weather, self.choices = weather, choices
        self.scheduler.choices, self.scheduler.switches = choices, weather.switches
        self.sends: dict[Key, deque[Transfer]] = {}
        self.receives: dict[Key, deque[Transfer]] = {}
        self.meetings: dict[tuple[tuple[int, ...], int, int], Meeting] = {}
        self.counts: dict[tuple[tuple[int, ...], int, int], int] = {}
        self.open: dict[int, list[Transfer | Joining]] = {rank: [] for rank in range(self.size)}
        self.failures: list[str | None] = [None] * self.size
        self.left: list[str] = []
        """What ranks say that have left: who waits for them in vain is told."""
        self.dead: set[int] = set()
        self.killed = False
        self.misuses: list[str] = []
        self.reports: list[tuple[int, str]] = []

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each rank's job gave or raised."""
        return self.scheduler.run(jobs)

    def close(self) -> None:
        """Ends the threads."""
        self.scheduler.close()

    def step(self, rank: int, what: Callable[[], str]) -> None:
        """A rank is about to do something: others may run first, or the rank be disturbed."""
        if self.killed or rank in self.dead:
            raise Killed
        if self.trace is not None:
            self.trace.append((self.scheduler.now, rank, what()))
        self.watch(rank, "")
        self.scheduler.pause(rank)
        if self.killed:
            raise Killed

    def misuse(self, text: str) -> None:
        """Something that no program may do has been done."""
        self.misuses.append(text)

    def sleep(self, rank: int, seconds: float) -> None:
        """A rank does nothing for some time."""
        nap = _Nap()

        def end() -> None:
            nap.over = True

        self.scheduler.after(seconds, end)
        self.scheduler.block(rank, nap)

    def die(self, rank: int) -> None:
        """A rank is killed; a little later the launcher ends the job."""

        def end() -> None:
            self.killed = True

        self.dead.add(rank)
        self.scheduler.after(self.choices.seconds(NOTICED), end)
        raise Killed

    def leftovers(self) -> list[str]:
        """What a sound program has not left when all ranks have ended well: messages nobody took, transfers nobody waited for."""
        found = [
            f"rank {key[0]} sent to rank {key[1]}, tag {key[2]}, what nobody received" for key in _left(self.sends)
        ]
        found += [f"rank {key[1]} posted a receive, tag {key[2]}, that nothing met" for key in _left(self.receives)]
        found += [
            f"ranks {sorted(one.brought)} came to {one.signature[0]}, others not" for one in self.meetings.values()
        ]
        for rank, requests in self.open.items():
            found += [f"rank {rank} never waited for {named(request)}" for request in requests]
        return found

    def delay(self) -> float:
        """How long something is under way."""
        weather = self.weather
        late = weather.delay and self.choices.chance(weather.late)
        return self.choices.seconds(weather.delay) if late else 0.0

    def later(self, seconds: float, request: Transfer | Joining) -> None:
        """Complete a request, now or later."""
        if seconds <= 0:
            request.done = True
            return

        def end() -> None:
            request.done = True

        self.scheduler.after(seconds, end)

    def meet(self, ranks: tuple[int, ...], own: int, rank: int, signature: tuple[Any, ...], thing: Any) -> Meeting:
        """The meeting that a rank comes to with its next call among these ranks, of the job, of a communicator of their own, or of
        one of their agreements."""
        count = self.counts[ranks, own, rank] = self.counts.get((ranks, own, rank), 0) + 1
        meeting = self.meetings.setdefault((ranks, own, count), Meeting(signature))
        if meeting.signature != signature:
            text = f"ranks {ranks} call different collectives: {meeting.signature} and, on rank {rank}, {signature}"
            self.misuse(text)
            raise RankError(text)
        meeting.brought[rank] = thing
        if len(meeting.brought) == len(ranks):
            del self.meetings[ranks, own, count]
            meeting.complete = True
        return meeting

    def wait(self, rank: int, waiter: Any, what: What) -> None:
        """Wait until something is ready; RankError where another rank has failed."""
        if waiter.ready():
            return
        waiting = _Interrupted(self, rank, waiter)
        self._report(rank, waiting, what, self.stall)
        self.scheduler.block(rank, waiting)
        if self.killed:
            raise Killed
        failure = self.failures[rank]
        if failure is not None and (not waiter.ready() or self.choices.chance(0.5)):
            raise RankError(failure)

    def _report(self, rank: int, waiting: _Interrupted, what: What, seconds: float) -> None:
        def report() -> None:
            if self.scheduler.waiting[rank] is waiting and not waiting.ready():
                self.reports.append((rank, stalled(rank, self.scheduler.now, what())))
                self.scheduler.after(seconds, report, idle=True)

        self.scheduler.after(seconds, report, idle=True)

    def _stuck(self) -> None:
        running = self.scheduler.running()
        if all(self.failures[rank] for rank in running):
            self.killed = True
        text = next(iter(self.left), "")
        if not text:
            text = f"no rank can go on: {', '.join(f'rank {rank}' for rank in running)}"
            self.misuse(text)
        for rank in running:
            self.failures[rank] = self.failures[rank] or text


@dataclass
class _Interrupted:
    """A wait that the failure of another rank ends."""

    world: SimulatedWorld
    rank: int
    waiter: Any

    def ready(self) -> bool:
        return self.waiter.ready() or self.world.killed or self.world.failures[self.rank] is not None


def _left(queues: dict[Key, deque[Transfer]]) -> list[Key]:
    return [key for key, queue in queues.items() for _ in queue]
