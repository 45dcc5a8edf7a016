"""Measures the time of messages and collectives between ranks, and the share of an AllReduce that overlaps with a computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from partc.cli.machine.kernels import convolutions, products, session_run, timed, undisturbed
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SUM
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.artifact.tensors.tensor import aligned
from partc.runtime.communication.transport import CollectiveArgs, Request, Transport

SIZES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
_ROUNDS, _FEW, _WARM = 40, 10, 3
_BATCHES = 9
"""The number of measurements of small messages.

All messages within one measurement take the same time, but those of the next may take twice as long, since ranks run on other cores.
"""
_LARGE = 1 << 20
_TAG = 1
_COLLECTIVES, _ITEM = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL), 4
_BESIDE = 1 << 21
"""The bytes of the AllReduce that overlaps with a computation."""


def messages(transport: Transport, ranks: Sequence[int]) -> dict[int, float]:
    """Maps bytes to the seconds of a message, between pairs of neighbours in the list."""
    return {
        size: median(_one_way(transport, ranks, size, lambda: None) for _ in range(1 if size > _LARGE else _BATCHES))
        for size in SIZES
    }


def wake(transport: Transport, ranks: Sequence[int], threads: int) -> float:
    """Returns the extra seconds of a session's run after a wait for a message, compared with a run directly after another run."""
    sample, _ = next(convolutions())
    run, size = session_run(sample, threads), SIZES[1]
    between = median(
        _one_way(transport, ranks, size, run) - _one_way(transport, ranks, size, lambda: None) for _ in range(_BATCHES)
    )
    return max(1e-8, between - timed(run, threads)) if between else 0.0


def _one_way(transport: Transport, ranks: Sequence[int], size: int, action: Callable[[], object]) -> float:
    """Returns half the seconds of a message there and back, with the action before each; 0 for an odd rank without a partner."""
    place = ranks.index(transport.rank)
    paired = place ^ 1 < len(ranks)
    peer = ranks[place ^ 1] if paired else transport.rank
    leaving_bytes, taken, times = aligned(size), aligned(size), list[float]()
    leaving_bytes[:] = 1
    transport.all_gather_text("")
    for _ in range(_WARM + _rounds(size)) if paired else ():
        begin = time.perf_counter()
        coming = transport.irecv(taken, peer, _TAG)
        if place % 2:
            transport.wait(coming, _what)
            action()
            transport.wait(transport.isend(leaving_bytes, peer, _TAG), _what)
        else:
            action()
            leaving = transport.isend(leaving_bytes, peer, _TAG)
            transport.wait(coming, _what)
            transport.wait(leaving, _what)
        times.append((time.perf_counter() - begin) / 2)
    return undisturbed(times[_WARM:]) if times else 0.0


def collectives(transport: Transport, ranks: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Maps each op to a map of the bytes that each rank gives to the seconds of the collective, from when all ranks have reached it."""
    times_of: dict[str, dict[int, float]] = {op: {} for op in _COLLECTIVES}
    for size in SIZES:
        for op in _COLLECTIVES:
            begin_all, given_bytes = _collective(transport, op, ranks, size, at_once=True)
            transport.all_gather_text("")
            times = []
            for _ in range(_WARM + _rounds(size)):
                begin = time.perf_counter()
                transport.wait(begin_all(), _what)
                times.append(time.perf_counter() - begin)
            times_of[op][given_bytes] = undisturbed(times[_WARM:])
    return times_of


def overlap(transport: Transport, ranks: tuple[int, ...], threads: int) -> float:
    """Returns the share of an AllReduce that runs during a longer computation."""
    begin_all, _ = _collective(transport, ALL_REDUCE, ranks, _BESIDE, at_once=False)
    computed = session_run([sample for kind, sample in products() if kind == "matmul"][-1], threads)
    accompanied = transport.with_progress(computed)

    def reduced() -> None:
        transport.wait(begin_all(), _what)

    def both() -> None:
        request = begin_all()
        accompanied()
        transport.wait(request, _what)

    alone, beside, together = (_time_of(transport, action) for action in (reduced, computed, both))
    return min(1.0, max(0.0, (alone + beside - together) / max(1e-9, min(alone, beside))))


def _time_of(transport: Transport, action: Callable[[], object]) -> float:
    transport.all_gather_text("")
    times = []
    for _ in range(_WARM + _FEW):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return undisturbed(times[_WARM:])


def _collective(
    transport: Transport, op: str, ranks: tuple[int, ...], size: int, at_once: bool
) -> tuple[Callable[[], Request], int]:
    """Returns a function that starts a collective, and the bytes of its source.

    The larger one of its source and target has about `size` bytes, rounded down to whole shards.
    """
    shard = size // _ITEM // len(ranks) * _ITEM
    given, taken = (shard if op == small else shard * len(ranks) for small in (ALL_GATHER, REDUCE_SCATTER))
    source, target = aligned(given), aligned(taken)
    source.view(np.float32)[:] = 1
    reduce = SUM if op in (ALL_REDUCE, REDUCE_SCATTER) else ""
    args = CollectiveArgs(op, ranks, _TAG, source, target, BY_NAME["float"], reduce, at_once=at_once)
    return transport.prepare(args), given


def _rounds(size: int) -> int:
    return _FEW if size > _LARGE else _ROUNDS


def _what() -> str:
    return "a measurement of the links"
