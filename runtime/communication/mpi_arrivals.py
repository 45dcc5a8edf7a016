"""Calls of MPI that block, made when all ranks have come: outside of the call stalls and failures are seen, and inside of it nothing is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from mpi4py import MPI

from ..job.pauses import sleeps
from .mpi_watch import Watch
from .transport import Request

_FRESH, _LINGER = 0.5, 1.0
"""Seconds: how old a rank's knowledge of failures may be when it arrives, and how long one that has arrived stays."""


class Barrier(Protocol):
    """A rank's end of a barrier: `arrive` is one more round, and `over` says whether all have come to it."""

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
    """A collective as a request: its test completes it, by a call of MPI that blocks, when all ranks have come; then it returns at once.

    A rank arrives when it first tests: it has begun by then whatever others may wait for. Who has arrived must make the call once all
    have, for the others are inside, and nothing interrupts them there. That rests on times, as an arrival at MPI's barrier cannot be
    taken back. A rank that learns of a failure does not arrive, and one that has arrived by then stays for a second (`linger`):
    whoever has not heard of it comes within that time, since `look`, which raises where a rank has failed, is never older than
    half a second when a rank arrives. Who is held up for longer between the two is left inside.
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
        """The request of one more round."""
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
        """Makes the call with those who come within a second, where this rank has arrived and gives up for another's failure."""
        for _ in sleeps(1e-3, within=_LINGER):
            if not self.here or self.called or self.Test():
                return
