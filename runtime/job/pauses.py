"""Waits by polling: a rank always yields its core between two polls.

    for _ in spins(2e-3):                   # the first poll at once, the next ones whenever no other process wants the core
        if request.Test():
            return
    for waited in sleeps(2e-5, 1e-4):       # 20 microseconds, and twice as long each time, up to a tenth of a millisecond
        if request.Test():
            break

A rank that polls without giving its core up may block the rank for which it waits: the system may have put both on one core, even with as
many cores as ranks, since another process may run on the other core. Each wait then takes a time slice of the system, some milliseconds,
until the other rank runs. Giving the core up costs less than a microsecond if no other process wants it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

_LONG_WAIT = 0.1
_SLEEP_OF_A_LONG_WAIT = 1e-3

give_way = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))
"""Gives the core to another process or thread that wants it, if there is one."""


def spins(seconds: float) -> Iterator[None]:
    """Yields at once, and then repeatedly for `seconds`; in between any other process that wants the core gets it."""
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        give_way()
        yield


def sleeps(shortest: float, longest: float | None = None, within: float | None = None) -> Iterator[float]:
    """Yields the seconds waited so far, at once and after each sleep.

    The first sleep takes `shortest` seconds, each further one twice as long, up to `longest`; after a tenth of a second up to at least a
    millisecond. With `within` the last value comes after that many seconds.
    """
    begun, sleep, most = time.monotonic(), shortest, longest or shortest
    waited = 0.0
    yield waited
    while within is None or waited < within:
        time.sleep(sleep)
        waited = time.monotonic() - begun
        yield waited
        sleep = min(2 * sleep, most if waited < _LONG_WAIT else max(most, _SLEEP_OF_A_LONG_WAIT))
