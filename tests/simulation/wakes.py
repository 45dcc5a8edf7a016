"""How ranks of a host wait for each other, in interleavings that seeds decide: loads, stores, fences and system calls are switching points.

    python tests/simulation/wakes.py [--runs 100000] [--from 0]

Memory is that of x86: a rank's stores wait in a buffer of its own, in their order, and are seen by the others at any time later, or at its
next fence or system call. Sleeps have no time-out in most runs, so a wake that is lost ends the run; in the others some end at once. A rank
may be killed before any of its stores: then those that sleep look for failures, as they do after their time, and each rank ends with the
right values or with a RankError.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from partc.runtime.communication.host import messages
from partc.runtime.communication.host.messages import Channel, HostMessages
from partc.runtime.communication.host.plane import collective_of
from partc.runtime.communication.host.rounds import ROOMS, Collective, HostGroup, Rounds, closing
from partc.runtime.errors import RankError
from partc.runtime.job.parking import RankWait, YieldTurns
from simulation.scheduler import Choices, Killed, Scheduler

TURNS = 6


class Memory:
    """Numbers by name, and the stores of each rank that others do not see yet."""

    def __init__(self, scheduler: Scheduler, dies: tuple[int, int] | None) -> None:
        self.scheduler, self.dies = scheduler, dies
        self.numbers: dict[Any, int] = {}
        self.buffers: list[deque[tuple[Any, int]]] = [deque() for _ in range(scheduler.size)]
        self.stores = [0] * scheduler.size
        self.asleep: list[Any] = [None] * scheduler.size
        """By rank the name of the number on which it sleeps."""
        self.dead: list[int] = []
        self.lost = self.failed = False
        self.short_sleeps = 0.0
        """How often a sleep is over at once."""
        scheduler.stuck = self.stuck

    def point(self, rank: int) -> None:
        choices = self.scheduler.choices
        for buffer in self.buffers:
            if buffer and choices.chance(0.3):
                self.drain(buffer)
        self.scheduler.pause(rank)

    def drain(self, buffer: deque[tuple[Any, int]]) -> None:
        name, number = buffer.popleft()
        self.numbers[name] = number

    def load(self, rank: int, name: Any) -> int:
        self.point(rank)
        own = [number for at, number in self.buffers[rank] if at == name]
        return own[-1] if own else self.numbers.get(name, 0)

    def store(self, rank: int, name: Any, number: int) -> None:
        self.stores[rank] += 1
        if (rank, self.stores[rank]) == self.dies:
            self.dead.append(rank)
            raise Killed
        self.point(rank)
        self.buffers[rank].append((name, number))

    def fence(self, rank: int) -> None:
        self.point(rank)
        while self.buffers[rank]:
            self.drain(self.buffers[rank])

    def sleep(self, rank: int, name: Any, seen: int) -> None:
        """A futex wait: until woken, if the number is still what was seen."""
        self.fence(rank)
        if self.numbers.get(name, 0) == seen and not self.scheduler.choices.chance(self.short_sleeps):
            self.asleep[rank] = name
            self.scheduler.block(rank, Asleep(self, rank))

    def wake(self, rank: int, name: Any) -> None:
        """A futex wake of all that sleep on a number."""
        self.fence(rank)
        self.asleep = [None if one == name else one for one in self.asleep]

    def stuck(self) -> None:
        """All that are left sleep: for a rank that was killed, or since a wake was lost."""
        self.lost |= not self.dead
        self.failed = True
        self.asleep = [None] * len(self.asleep)

    def look(self) -> None:
        if self.failed:
            raise RankError("another rank has failed")


class SimulatedCell:
    """A number of shared memory as one rank sees it."""

    def __init__(self, memory: Memory, rank: int, *name: Any) -> None:
        self.memory, self.rank, self.name = memory, rank, name

    def __getitem__(self, at: int) -> int:
        return self.memory.load(self.rank, (*self.name, at))

    def __setitem__(self, at: int, number: int) -> None:
        self.memory.store(self.rank, (*self.name, at), number)


class Asleep:
    def __init__(self, memory: Memory, place: int) -> None:
        self.memory, self.place = memory, place

    def ready(self) -> bool:
        return self.memory.asleep[self.place] is None


class SimulatedWords:
    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory, self.rank = memory, rank
        self.cells = [SimulatedCell(memory, rank, "word", place) for place in range(memory.scheduler.size)]

    def sleep(self, place: int) -> None:
        self.memory.sleep(self.rank, ("word", place, 0), 1)

    def wake(self, place: int) -> None:
        self.memory.wake(self.rank, ("word", place, 0))


class SimulatedCount:
    def __init__(self, memory: Memory, rank: int, *name: Any) -> None:
        self.memory, self.rank, self.name = memory, rank, (*name, 0)
        self.cell = SimulatedCell(memory, rank, *name)

    def sleep(self, seen: int) -> None:
        self.memory.sleep(self.rank, self.name, seen)

    def wake(self) -> None:
        self.memory.wake(self.rank, self.name)


class SimulatedTurns(YieldTurns):
    """A turn of the others is a switching point; in some waits there is none."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory, self.rank = memory, rank

    def is_ready_after(self, ready: Callable[[], bool]) -> bool:
        if self.memory.scheduler.choices.chance(0.5):
            return False
        self.memory.point(self.rank)
        return ready()


class Values(Rounds):
    """A collective of `count` rounds: each rank puts a number that says the rank and the round, and gets those of all and their sum."""

    def __init__(self, memory: Memory, rank: int, count: int) -> None:
        self.memory, self.rank, self.count, self.round, self.wrong = memory, rank, count, 0, 0
        self.ranks = range(memory.scheduler.size)

    def put(self, index: int, turn: int) -> Callable[[], object]:

        def write() -> None:
            self.round += 1
            self.memory.store(self.rank, ("room", turn, self.rank), 1000 * self.rank + self.round)

        return write

    def close(self, index: int, turn: int) -> Callable[[], object]:
        def add() -> None:
            total = sum(self.memory.load(self.rank, ("room", turn, rank)) for rank in self.ranks)
            self.memory.store(self.rank, ("common", turn), total)

        return add

    def get(self, index: int, turn: int) -> Callable[[], object]:
        def read() -> None:
            self.got = getattr(self, "got", 0) + 1
            numbers = [1000 * rank + self.got for rank in self.ranks]
            if len(numbers) > 2:
                self.wrong += self.memory.load(self.rank, ("common", turn)) != sum(numbers)
            for rank, number in enumerate(numbers):
                self.wrong += self.memory.load(self.rank, ("room", turn, rank)) != number

        return read


def wait(parking: RankWait, memory: Memory, ready: Callable[[], bool], group: HostGroup | None = None) -> None:
    """Waits as `DataPlane` does; `group` is that of a collective beside which nothing is under way."""

    def look() -> None:
        if group is not None:
            group.close_own()
        memory.look()

    count = group and group.closed
    if not ready() and not parking.spins(ready, count):
        parking.wait(ready, look, count)


def collectives(memory: Memory, rank: int, random: Random) -> int:
    """Collectives of one or three rounds, of which two may be begun before the first is waited for; how many values are wrong."""
    parking = RankWait(
        SimulatedWords(memory, rank), rank, partial(memory.fence, rank), None, SimulatedTurns(memory, rank)
    )
    cells = [SimulatedCell(memory, rank, "arrivals", other) for other in range(memory.scheduler.size)]
    others = [other for other in range(memory.scheduler.size) if other != rank]
    closed, raised = (SimulatedCount(memory, rank, "arrivals", at) for at in closing(memory.scheduler.size, rank))
    group, rounds = HostGroup(cells, rank, others, parking, closed, raised), Values(memory, rank, 1)
    counts, own = [random.choice((1, 1, 3)) for _ in range(TURNS)], Random(random.random() + rank)
    begun: deque[Collective] = deque()
    for count in counts:
        rounds.count = count
        one = Values(memory, rank, count)
        one.put, one.get, one.close = rounds.put, rounds.get, rounds.close  # type: ignore[method-assign]
        begun.append(collective_of(group, one).begin())
        on_count = group if own.random() < 0.7 else None
        if len(begun) == 3 or rank % 2:
            first = begun.popleft()
            wait(parking, memory, first.Test, on_count)
            rounds.wrong += not first.done
    for left in begun:
        wait(parking, memory, left.Test, group)
        rounds.wrong += not left.done
    return rounds.wrong


def exchanges(memory: Memory, rank: int, random: Random) -> int:
    """Messages of several slots to both others, of two tags, received in another order; how many have wrong bytes."""
    parking = RankWait(
        SimulatedWords(memory, rank), rank, partial(memory.fence, rank), None, SimulatedTurns(memory, rank)
    )
    slots: dict[Any, list[np.ndarray]] = memory.__dict__.setdefault("slots", {})

    def channel(source: int, target: int) -> Channel:
        cells = [SimulatedCell(memory, rank, "channel", source, target, at) for at in range(2 + messages.SLOTS)]
        data = slots.setdefault((source, target), [np.zeros(messages.SLOT, np.uint8) for _ in range(messages.SLOTS)])
        return Channel(cells[0], cells[1], [*cells[2:]], data)

    ends = HostMessages(rank, channel, parking)
    size = memory.scheduler.size
    lengths = [random.choice((0, 3, 4, 13)) for _ in range(2)]
    others = [other for other in range(size) if other != rank]
    sent, received = [], []
    for tag, length in enumerate(lengths):
        for other in others:
            sent.append(ends.send(np.full(length, 16 * rank + tag, np.uint8), other, tag))
    for tag, length in reversed([*enumerate(lengths)]):
        for other in others:
            received.append((16 * other + tag, ends.receive(np.full(length, 255, np.uint8), other, tag)))
    wrong = 0
    for number, message in received:
        wait(parking, memory, message.Test)
        wrong += bool((message.data != number).any())
    for message in sent:
        wait(parking, memory, message.Test)
    return wrong


KINDS = (collectives, exchanges)


def run(seed: int, schedulers: dict[int, Scheduler]) -> list[str]:
    """What goes wrong in the run of a seed."""
    random = Random(seed)
    size, kind = random.choice((2, 3)), KINDS[seed % len(KINDS)]
    if size not in schedulers:
        schedulers[size] = Scheduler(size)
    scheduler = schedulers[size]
    scheduler.choices, scheduler.switches = Choices(Random(seed + 1)), random.choice((0.05, 0.3, 0.7))
    dies = (random.randrange(size), random.randrange(1, 30)) if random.random() < 0.3 else None
    memory = Memory(scheduler, dies)
    memory.short_sleeps = random.choice((0.0, 0.0, 0.0, 0.5))
    with mock.patch.object(messages, "SLOTS", 2), mock.patch.object(messages, "SLOT", 4):
        jobs = [partial(kind, memory, rank, Random(seed)) for rank in range(size)]
        outcomes = scheduler.run(jobs)
    problems = [f"rank {rank} sleeps for ever" for rank in range(1) if memory.lost]
    for rank, outcome in enumerate(outcomes):
        if outcome.error is None and outcome.value:
            problems.append(f"rank {rank} has {outcome.value} wrong values")
        elif outcome.error is not None and not (memory.dead and isinstance(outcome.error, RankError | Killed)):
            problems.append(f"rank {rank}: {outcome.error!r}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    options = parser.parse_args()
    schedulers: dict[int, Scheduler] = {}
    for seed in range(options.first, options.first + options.runs):
        if problems := run(seed, schedulers):
            raise SystemExit(f"seed {seed}: {problems}")
        if seed % 10_000 == 9_999:
            print(f"{seed + 1 - options.first} runs", flush=True)
    print(f"{options.runs} interleavings, none wrong; {ROOMS} rooms")


if __name__ == "__main__":
    main()
