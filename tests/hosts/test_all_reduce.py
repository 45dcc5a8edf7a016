"""An AllReduce of ranks of a host: a small one of two takes few calls, since these are its time; sums are MPI's, without a warning."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from types import FrameType

import numpy as np
import pytest
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.communication.host.plane import DataPlane, RankList
from partc.runtime.communication.host.segment import Segment
from partc.runtime.communication.mpi import MpiTransport
from partc.runtime.communication.mpi_watch import Watch
from partc.runtime.communication.transport import CollectiveArgs
from partc.runtime.job.parking import Futex

MOST_CALLS = {"call": 11, "c_call": 13}
"""Calls that both ranks make together: functions in Python, and functions in C."""


def two_ranks() -> list[tuple[MpiTransport, RankList]]:
    """Two ranks of one host in this thread: where the first one has begun, the second one finds it there."""
    segments = [Segment(), Segment()]
    segments[1].adopt(*segments[0].address)
    found = []
    for place, segment in enumerate(segments):
        transport = MpiTransport.__new__(MpiTransport)
        transport._plane = DataPlane(segment, Futex(), range(2), place, True, True, Watch(place, 30.0), list)
        among = transport._plane.list_of((0, 1))
        assert among is not None
        found.append((transport, among))
    return found


class Pair:
    """An AllReduce of two ranks."""

    def __init__(self, sources: list[np.ndarray], in_place: bool = False) -> None:
        self.targets = sources if in_place else [np.empty_like(source) for source in sources]
        self.ranks = two_ranks()
        dtype = BY_NAME["float"]
        args = [
            CollectiveArgs("AllReduce", (0, 1), 0, source.view(np.uint8), target.view(np.uint8), dtype, "sum")
            for source, target in zip(sources, self.targets, strict=True)
        ]
        self.begins = [among.prepare(one) for (_, among), one in zip(self.ranks, args, strict=True)]

    def run(self, last: int = 1) -> None:
        """Once; the rank that begins last finds the other one there."""
        requests = {rank: self.begins[rank]() for rank in (1 - last, last)}
        for rank, request in requests.items():
            self.ranks[rank][0].wait(request, lambda: "an AllReduce")


def test_a_small_all_reduce_of_two_ranks_takes_few_calls() -> None:
    pair = Pair([np.ones(1, np.float32), np.ones(1, np.float32)])
    for _ in range(8):  # what is made once a room is made
        pair.run()
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        pair.run()
    finally:
        sys.setprofile(None)
    assert calls["call"] <= MOST_CALLS["call"], calls
    assert calls["c_call"] <= MOST_CALLS["c_call"], calls
    assert pair.targets[0].tolist() == pair.targets[1].tolist() == [2.0]


@pytest.mark.parametrize("size", [1, 1000, 200_001])
@pytest.mark.parametrize("in_place", [False, True])
def test_both_ranks_have_the_same_bits_whoever_comes_last(size: int, in_place: bool) -> None:
    chance = np.random.default_rng(size)
    sources = [chance.normal(size=size).astype(np.float32) for _ in range(2)]
    sources[0][0] = np.inf
    pair = Pair([source.copy() for source in sources], in_place)
    told = np.geterr()
    for turn in range(6):
        wanted = (pair.targets[0] + pair.targets[1] if in_place and turn else sources[0] + sources[1]).view(np.uint32)
        if size * 4 <= 1 << 19:
            pair.run(turn % 2)
        else:
            _in_turns(pair)
        for target in pair.targets:
            assert (target.view(np.uint32) == wanted).all()
    assert np.geterr() == told


def _in_turns(pair: Pair) -> None:
    """Several rounds, for which both ranks look in turns."""
    requests = [begin() for begin in pair.begins]
    for _ in range(20):
        for request in requests:
            request.Test()
    assert all(request.Test() for request in requests)


def test_infinities_and_what_is_no_number_are_made_without_a_warning() -> None:
    largest = np.finfo(np.float32).max
    pair = Pair([np.array([largest, np.inf], np.float32), np.array([largest, -np.inf], np.float32)])
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        pair.run()
    assert np.isinf(pair.targets[1][0])
    assert np.isnan(pair.targets[1][1])


@pytest.mark.parametrize(
    ("size", "own_core", "rounds"), [(1 << 16, True, 2), (1 << 16, False, 1), (1 << 19, False, 1), (1 << 20, False, 4)]
)
def test_ranks_that_share_cores_sleep_once_in_what_fits_into_a_room(size: int, own_core: bool, rounds: int) -> None:
    plane = DataPlane(Segment(), Futex(), range(3), 0, own_core, True, Watch(0, 30.0), list)
    among = plane.list_of((0, 1, 2))
    assert among is not None
    data = np.zeros(size, np.uint8)
    begin = among.prepare(CollectiveArgs("AllReduce", (0, 1, 2), 0, data, data, BY_NAME["float"], "sum"))
    request = begin()
    assert request.rounds.count == rounds
