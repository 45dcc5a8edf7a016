"""Makes MPI's blocking calls only when all ranks have come: stalls and failures are noticed before the call, and not inside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from mpi4py import MPI

from ..job.pauses import sleeps
from .mpi_watch import Watch
from .transport import Request

_FRESH, _LINGER = 0.5, 1.0
"""Seconds: the greatest age of a rank's check for failures when it arrives, and how long a rank that has arrived stays."""


class Barrier(Protocol):
    """A rank's end of a barrier: `arrive` begins another round, and `over` returns whether all ranks have arrived in it."""

    def arrive(self) -> None: ...
    def over(self) -> bool: ...


class MpiBarrier:
    """MPI's barrier."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._arrivals: MPI.Request = MPI.REQUEST_NULL

    def arrive(self) -> None:
        self._arrivals = self.comm.Ibarrier()

    def over(self) -> bool:
        return self._arrivals.Test()


class BlockingCollective:
    """A collective as a request: when all ranks have come, its test completes it by a blocking call of MPI, which then returns at once.

    A rank arrives when it first tests: by then it has begun everything for which others may wait. Once all have arrived, each rank must
    make the call, because the others are inside it, and nothing interrupts them there. That relies on times, as an arrival at MPI's barrier
    cannot be taken back. A rank that learns of a failure does not arrive, and one that has arrived by then stays for a second (`linger`): a
    rank that has not heard of the failure comes within that time, since `look`, which raises where a rank has failed, was called at most
    half a second before a rank arrives. A rank that is delayed for longer between the two is left inside the call.
    """

    def __init__(
        self,
        arrivals: Barrier,
        call: Callable[[], object],
        watch: Watch,
        what: str,
        look: Callable[[], object],
    ) -> None:
        self.arrivals = arrivals
        self.look = look
        self.looked = 0.0
        self.call = call
        self.here = self.called = False
        self.watch = watch
        self.what = lambda: what

    def begin(self) -> Request:
        """Begins another round, and returns its request."""
        self.here = self.called = False
        return self

    def Test(self) -> bool:
        if not self.here:
            now = time.monotonic()
            if now - self.looked > _FRESH:
                self.look()
                self.looked = now
            self.arrivals.arrive()
            self.here = True
        if not self.arrivals.over():
            return False
        self.called = True
        self.watch.begin(self.what)
        self.call()
        self.watch.end()
        return True

    def linger(self) -> None:
        """Makes the call with the ranks that come within a second; for a rank that has arrived and ends its wait for another's failure."""
        for _ in sleeps(1e-3, within=_LINGER):
            if not self.here or self.called or self.Test():
                return
