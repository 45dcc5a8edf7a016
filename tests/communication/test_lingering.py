"""A rank that has arrived at a blocking collective makes its call with those who come, also where it gives up for another's failure."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from partc.runtime.communication.shared_memory import BlockingCollective, DecidedCollective, ShmBarrier
from partc.runtime.errors import RankError


class Counter:
    """A barrier of two ranks in memory."""

    def __init__(self, own: list[int], other: list[int]) -> None:
        self.own, self.others, self.round = own, [other], 0

    def arrive(self) -> None:
        self.round += 1
        self.own[0] = self.round

    def close(self) -> None: ...


class Quiet:
    """A watch, and a communicator, of which nothing is asked."""

    def begin(self, what: Any) -> None: ...
    def end(self) -> None: ...
    def Iprobe(self) -> None: ...


def pair(calls: list[int], looks: Any = lambda: None) -> tuple[BlockingCollective, BlockingCollective]:
    one, two = [0], [0]
    quiet: Any = Quiet()
    first = BlockingCollective(Counter(one, two), quiet, lambda: calls.append(0), quiet, "it", lambda: None)
    return first, BlockingCollective(Counter(two, one), quiet, lambda: calls.append(1), quiet, "it", looks)


def test_who_has_arrived_stays_for_those_who_have_not_heard() -> None:
    calls: list[int] = []
    first, second = pair(calls)
    first.begin()
    assert not first.Test()
    late = threading.Timer(0.1, lambda: (second.begin(), second.Test()))
    late.start()
    first.linger()
    late.join()
    assert sorted(calls) == [0, 1]


def test_nobody_is_waited_for_without_end() -> None:
    calls: list[int] = []
    first, _ = pair(calls)
    first.begin()
    assert not first.Test()
    begun = time.monotonic()
    first.linger()
    assert time.monotonic() - begun > 0.9
    assert calls == []


def test_who_has_heard_of_a_failure_does_not_arrive() -> None:
    def failed() -> None:
        raise RankError("rank 2 has failed")

    calls: list[int] = []
    first, second = pair(calls, failed)
    first.begin(), second.begin()
    with pytest.raises(RankError):
        second.Test()
    assert not first.Test()
    second.linger()
    assert calls == []


class Turns:
    """Lets two threads do one access of shared memory at a time, in an order that is given; then each in turn."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order
        self.may = [threading.Semaphore(0), threading.Semaphore(0)]
        self.reached = [threading.Semaphore(0), threading.Semaphore(0)]
        self.over = [False, False]

    def access(self, who: int) -> None:
        self.reached[who].release()
        self.may[who].acquire()

    def run(self, actors: list[Any]) -> None:
        def act(who: int) -> None:
            self.access(who)
            actors[who]()
            self.over[who] = True
            self.reached[who].release()

        threads = [threading.Thread(target=act, args=(who,)) for who in (0, 1)]
        for who, thread in enumerate(threads):
            thread.start()
            self.reached[who].acquire()
        for who in itertools.chain(self.order, itertools.cycle((0, 1))):
            if all(self.over):
                break
            if not self.over[who]:
                self.may[who].release()
                self.reached[who].acquire()
        for thread in threads:
            thread.join()


class Line:
    """A rank's line as one of two ranks sees it."""

    def __init__(self, numbers: list[int], turns: list[Turns], who: int) -> None:
        self.numbers, self.turns, self.who = numbers, turns, who

    def __getitem__(self, at: int) -> int:
        if self.turns:
            self.turns[0].access(self.who)
        return self.numbers[at]

    def __setitem__(self, at: int, number: int) -> None:
        if self.turns:
            self.turns[0].access(self.who)
        self.numbers[at] = number


def decided(turns: list[Turns], calls: list[int]) -> list[DecidedCollective]:
    """One collective as each of two ranks sees it, in memory that they share."""
    lines = [[0] * 8, [0] * 8]
    quiet: Any = Quiet()
    found = []
    for rank in (0, 1):
        comm: Any = SimpleNamespace(rank=rank, size=2, Iprobe=lambda: None)
        barrier = ShmBarrier(comm, memoryview(bytearray(ShmBarrier.size(2))))
        barrier.cells = [Line(numbers, turns, rank) for numbers in lines]  # type: ignore[misc]
        barrier.others = [barrier.cells[1 - rank]]
        found.append(DecidedCollective(barrier, comm, lambda rank=rank: calls.append(rank), quiet, "it"))
    for one in found:
        one.begin()
    return found


@pytest.mark.parametrize("tests", [1, 2])
def test_all_make_the_call_or_none_whenever_one_gives_up(tests: int) -> None:
    """The rank that gives up has arrived; the first one tests and gives up, too: in every order of their accesses."""
    outcomes = set()
    for order in itertools.product((0, 1), repeat=8):
        turns: list[Turns] = []
        calls: list[int] = []
        first, other = decided(turns, calls)
        assert not other.Test()
        turns.append(Turns(order))

        def tries(first: DecidedCollective = first) -> None:
            if not any(first.Test() for _ in range(tests)):
                first.linger()

        turns[0].run([tries, other.linger])
        assert sorted(calls) in ([], [0, 1]), order
        outcomes.add(len(calls))
    assert outcomes == {0, 2}


def test_who_withdraws_does_not_wait_and_is_not_left_inside() -> None:
    calls: list[int] = []
    first, other = decided([], calls)
    assert not other.Test()
    begun = time.monotonic()
    other.linger()
    assert time.monotonic() - begun < 0.5
    assert not first.Test()
    first.linger()
    assert calls == []
