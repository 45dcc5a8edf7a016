"""A rank that has arrived at a blocking collective makes its call with those who come, also where it gives up for another's failure."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from partc.runtime.communication.mpi import BlockingCollective
from partc.runtime.errors import RankError


class Counter:
    """A barrier of two ranks in memory."""

    def __init__(self, own: list[int], other: list[int]) -> None:
        self.own, self.other = own, other

    def arrive(self) -> None:
        self.own[0] += 1

    def over(self) -> bool:
        return self.other[0] >= self.own[0]


class Quiet:
    """A watch of which nothing is asked."""

    def begin(self, what: Any) -> None: ...
    def end(self) -> None: ...


def pair(calls: list[int], looks: Any = lambda: None) -> tuple[BlockingCollective, BlockingCollective]:
    one, two = [0], [0]
    quiet: Any = Quiet()
    first = BlockingCollective(Counter(one, two), lambda: calls.append(0), quiet, "it", lambda: None)
    return first, BlockingCollective(Counter(two, one), lambda: calls.append(1), quiet, "it", looks)


def test_who_has_arrived_stays_for_those_who_have_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.runtime.communication.mpi._LINGER", 60.0)
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
