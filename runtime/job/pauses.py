"""Waiting by polling: a rank always yields its core between two polls.

    for _ in spins(2e-3):                  # first at once, and then whenever no other process wants the core
        if request.Test():
            return
    for waited in sleeps(2e-5, 1e-4):      # 20 microseconds, and twice as long each time, up to a tenth of a millisecond
        if request.Test():
            break

A rank that looks without giving its core up keeps it from whom it waits for: the system may have put both on one core, although there
are as many cores as ranks, since any other process is on the other one. It then takes a time slice of the system, some milliseconds,
until the other one runs, in every wait. Giving the core up costs less than a microsecond where no other process wants it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

_LONG_WAIT = 0.1
_SLEEP_OF_A_LONG_WAIT = 1e-3

give_way = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))
"""Lets another process or thread have the core, where one wants it."""


def spins(seconds: float) -> Iterator[None]:
    """A look at once, and one after another for so long, between which whoever wants the core gets it."""
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        give_way()
        yield


def sleeps(shortest: float, longest: float | None = None, within: float | None = None) -> Iterator[float]:
    """A look at once, and one after each sleep, `shortest` first and twice as long each time up to `longest`: the seconds waited so far.

    Once it has lasted a tenth of a second it sleeps for a millisecond at a time. It ends `within` seconds, where they are given, with a
    last look.
    """
    begun, sleep, most = time.monotonic(), shortest, longest or shortest
    waited = 0.0
    yield waited
    while within is None or waited < within:
        time.sleep(sleep)
        waited = time.monotonic() - begun
        yield waited
        sleep = min(2 * sleep, most if waited < _LONG_WAIT else max(most, _SLEEP_OF_A_LONG_WAIT))
