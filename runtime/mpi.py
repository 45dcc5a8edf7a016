"""Ranks as MPI processes, by mpi4py, on a communicator of the runtime's own.

A wait tests for a moment and then sleeps, 20 microseconds first and twice as long each time, up to a tenth of a millisecond and,
once it has lasted long, up to a whole one: ranks may outnumber cores, and a rank that spins takes its core from the one it waits
for. While it sleeps it looks whether another rank has failed. MPI counts in 32-bit integers, so that a longer message travels in
pieces.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
from mpi4py import MPI

from .dtypes import Bytes, Dtype
from .errors import RankError
from .mpi_circle import Circle, reduces
from .transport import Movement, Request, Vector, stalled, usable_cores

_PIECE = 1 << 30
_ALONE_SPIN = 2e-3
_CROWDED_SPIN = 5e-5
_SHORTEST_SLEEP = 2e-5
_LONGEST_SLEEP = 1e-4
_LONG_WAIT = 0.1
_BETWEEN_LOOKS = 2e-3
_LONGEST_SLEEP_OF_A_LONG_WAIT = 1e-3
_NOTICE = 1
_NOTICE_BYTES = 3000
_LEFT: list[object] = []
"""What messages under way may still touch after a failure: it must outlive every user."""


class _Tested(Protocol):
    def Test(self) -> bool: ...


class _Pieces:
    """A message in several pieces."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self.requests = requests

    def Test(self) -> bool:
        return MPI.Request.Testall(self.requests)


class MpiTransport:
    """One rank's end of an MPI communicator; creating it and closing it is collective."""

    def __init__(self, comm: MPI.Intracomm, stall: float = 30.0, piece: int = _PIECE) -> None:
        self.comm = comm.Dup()
        self.notices = comm.Dup()
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.stall = stall
        self.piece = piece
        self.tags: int = cast(int, self.comm.Get_attr(MPI.TAG_UB))
        neighbours = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        seen: Sequence[frozenset[int]] = [_cores(row) for row in neighbours.allgather(sorted(usable_cores()))]
        everyone = frozenset().union(*seen)
        self.cores = min(len(usable_cores()), max(1, len(everyone) // neighbours.size))
        self.crowded = neighbours.size > 1
        self.together = neighbours.size == self.size
        self.spins = neighbours.size <= len(everyone)
        self._yields = neighbours.size > len(everyone) and hasattr(os, "sched_yield")
        self._spin = _CROWDED_SPIN if neighbours.size > len(everyone) else _ALONE_SPIN
        neighbours.Free()
        self._failure: str | None = None
        self._agreeing: object = None  # kept: MPI may still write there when a wait was given up
        self._circles: dict[tuple[int, ...], Circle] = {}

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        if buffer.size > self.piece:
            return _Pieces([self.comm.Isend([part, MPI.BYTE], peer, tag) for part in self._parts(buffer)])
        return self.comm.Isend([buffer, MPI.BYTE], peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Request:
        if buffer.size > self.piece:
            return _Pieces([self.comm.Irecv([part, MPI.BYTE], peer, tag) for part in self._parts(buffer)])
        return self.comm.Irecv([buffer, MPI.BYTE], peer, tag)

    def wait(self, request: Request, what: Callable[[], str]) -> None:
        test: Callable[[], bool] = request.Test  # type: ignore[attr-defined]
        if test():
            return
        begun = time.monotonic()
        while time.monotonic() - begun < self._spin:
            if self._yields:
                os.sched_yield()
            if test():
                return
        sleep, report, look = _SHORTEST_SLEEP, self.stall, 0.0
        while not test():
            time.sleep(sleep)
            waited = time.monotonic() - begun
            if waited >= look:
                self._look()
                look = waited + _BETWEEN_LOOKS
            sleep = min(2 * sleep, _LONGEST_SLEEP if waited < _LONG_WAIT else _LONGEST_SLEEP_OF_A_LONG_WAIT)
            if waited >= report:
                print(stalled(self.rank, waited, what()), file=sys.stderr, flush=True)
                report *= 2

    def join(self, circles: Sequence[tuple[int, ...]]) -> None:
        for index, ranks in enumerate(circles):
            if self.rank in ranks and ranks not in self._circles:
                self._circles[ranks] = Circle(self.comm, ranks, index % self.tags)

    def reduces(self, dtype: Dtype, reduce: str) -> bool:
        return reduces(dtype, reduce)

    def ready(self, movement: Movement) -> Callable[[], Request]:
        return self._circles[movement.ranks].ready(movement)

    def agree(self, vector: Vector) -> Vector:
        result = np.empty_like(vector)
        request = self.comm.Iallreduce(vector, result, MPI.MAX)
        self._agreeing = (vector, result)
        self.wait(request, lambda: "the agreement on the sizes of a step")
        return result

    def share(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([mine.size], np.int64), sizes)
        longest = int(sizes.max())
        rows = np.zeros((self.size, longest), np.uint8)
        self.comm.Allgather(np.pad(mine, (0, longest - mine.size)), rows)
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def fail(self, message: str, buffers: object = None) -> None:
        if self._failure is None:
            self._failure = message
            # Short enough to leave at once: nobody is sure to wait for it.
            notice = np.frombuffer(message.encode()[:_NOTICE_BYTES], np.uint8)
            peers = (peer for peer in range(self.size) if peer != self.rank)
            _LEFT.append([notice, *(self.notices.Isend([notice, MPI.BYTE], peer, _NOTICE) for peer in peers)])
        _LEFT.append((self, buffers))

    def abort(self, message: str) -> None:
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
        self.comm.Abort(1)

    def close(self) -> None:
        # After a failure messages may still be under way: the communicators must outlive them.
        if self._failure is None and not MPI.Is_finalized():
            for circle in self._circles.values():
                circle.free()
            self.comm.Free()
            self.notices.Free()

    def _parts(self, buffer: Bytes) -> list[Bytes]:
        return [buffer[start : start + self.piece] for start in range(0, buffer.size, self.piece)]

    def _look(self) -> None:
        status = MPI.Status()
        if self._failure is None and self.notices.Iprobe(MPI.ANY_SOURCE, _NOTICE, status):
            notice = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.notices.Recv([notice, MPI.BYTE], status.Get_source(), _NOTICE)
            self._failure = notice.tobytes().decode(errors="ignore")
        if self._failure is not None:
            raise RankError(self._failure)


def _cores(row: Sequence[int]) -> frozenset[int]:
    return frozenset(row)
