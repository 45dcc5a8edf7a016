"""A rank that has arrived at a blocking collective makes its call with those who come, also where it gives up for another's failure."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from partc.runtime.communication.shared_memory import BlockingCollective
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
