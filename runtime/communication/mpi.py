"""Ranks as MPI processes, by mpi4py, on a communicator of the runtime's own.

A wait tests for a moment and then sleeps, 20 microseconds first and twice as long each time, up to a tenth of a millisecond and,
once it has lasted long, up to a whole one: ranks may outnumber cores, and a rank that spins takes its core from the one it waits
for. While it sleeps it looks whether another rank has failed, or has left: a rank says, when it leaves, how many agreements and
exchanges of all ranks it has taken part in, and who waits beyond those waits in vain. MPI counts in 32-bit integers, so that a longer
message travels in pieces.
"""

from __future__ import annotations

import json
import os
import platform
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from mpi4py import MPI

from ..artifact.dtypes import Bytes, Dtype
from ..errors import RankError
from ..files.regular import text_of_system
from ..job.machine import usable_cores
from ..job.pauses import sleeps, spins
from ..job.progress import Progress
from ..job.status_board import processes
from . import mpi_calls as calls
from . import shared_memory
from .leaving import expected
from .mpi_group import ProcessGroup
from .mpi_watch import Watch
from .transport import AGREEMENT, Agreements, CollectiveArgs, Request, Vector

_PIECE = 1 << 30
_ALONE_SPIN = 2e-3
_CROWDED_SPIN = 5e-5
_SHORTEST_SLEEP = 2e-5
_LONGEST_SLEEP = 1e-4
_BETWEEN_LOOKS = 2e-3
_NOTICE = 1
_NOTICE_BYTES = 3000
_ROUNDS = struct.Struct("<q")
_FAILED = -1
_LEFT: list[object] = []
"""What messages under way may still touch after a failure: it must outlive every user."""


class _Pieces:
    """A message in several pieces."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self.requests = requests

    def Test(self) -> bool:
        return MPI.Request.Testall(self.requests)


@dataclass(frozen=True)
class _Agreements:
    """Agreements on a communicator of their own."""

    begin: Callable[[Vector], Callable[[], Vector]]


class MpiTransport:
    """One rank's end of an MPI communicator; creating it and closing it is collective."""

    def __init__(self, comm: MPI.Intracomm, stall: float = 30.0, piece: int = _PIECE) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.stall = stall
        self.piece = piece
        self.tags: int = cast(int, comm.Get_attr(MPI.TAG_UB))
        self.notices: MPI.Intracomm | None = None
        self._processes: Mapping[int, int] = processes()
        self._watch = Watch(self.rank, stall, lambda: self._processes)
        self._spin = _CROWDED_SPIN
        self._failure: str | None = None
        self._interrupted: str | None = None
        self._left: list[tuple[int, str]] = []
        self._begun = self._done = 0
        """How many agreements and exchanges of all ranks this one has begun, and has taken part in."""
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._channels: list[MPI.Intracomm] = []
        self.wait(comm.Ibarrier(), lambda: "all ranks to begin to load")
        self.comm = calls.duplicate(comm, self._watch)
        self.notices = calls.duplicate(comm, self._watch)
        # No message waits there to be received, which would end a probe before it moves others.
        probe = partial(self.notices.Iprobe, MPI.ANY_SOURCE, _NOTICE)
        self._progress = Progress(probe, MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        expected(self)
        self._meet()

    def _meet(self) -> None:
        """Learns which ranks are on this machine, and with how many they share its cores."""
        mine = [_machine(), os.getpid(), sorted(usable_cores()), shared_memory.wanted()]
        rows = [json.loads(text) for text in self.all_gather_text(json.dumps(mine))]
        self._machines = [row[0] for row in rows]
        here = self._machines[self.rank]
        near = [rank for rank, machine in enumerate(self._machines) if machine == here]
        self._processes = {rank: rows[rank][1] for rank in near}
        everyone = frozenset().union(*(rows[rank][2] for rank in near))
        self.cores = min(len(usable_cores()), max(1, len(everyone) // len(near)))
        self._shares_memory = all(row[3] for row in rows)
        self.place = near.index(self.rank)
        self.shares_host = len(near) > 1
        self.single_host = len(near) == self.size
        self.has_own_core = len(near) <= len(everyone)
        self._spin = _ALONE_SPIN if self.has_own_core else _CROWDED_SPIN

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
        for _ in spins(self._spin):
            if test():
                return
        self._watch.begin(what)
        try:
            look = 0.0
            for waited in sleeps(_SHORTEST_SLEEP, _LONGEST_SLEEP):
                if test():
                    break
                if waited >= look:
                    self._look()
                    look = waited + _BETWEEN_LOOKS
        except BaseException:
            if isinstance(request, shared_memory.BlockingCollective):
                request.linger()
            # MPI may still write where a wait was given up.
            _LEFT.append(request)
            raise
        finally:
            self._watch.end()

    def interrupt(self, message: str) -> None:
        self._interrupted = self._interrupted or message

    def with_progress(self, action: Callable[[], object]) -> Callable[[], object]:
        return self._progress.during(action)

    def create_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        for index, ranks in enumerate(groups):
            if self.rank in ranks and ranks not in self._groups:
                near = self._shares_memory and len({self._machines[rank] for rank in ranks}) == 1
                self._groups[ranks] = ProcessGroup(
                    self.comm, ranks, index % self.tags, near, self._watch, self.wait, self._look
                )

    def reduces(self, dtype: Dtype, reduce: str) -> bool:
        return calls.reduces(dtype, reduce)

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        return self._groups[args.ranks].prepare(args)

    def all_reduce_max(self, vector: Vector) -> Vector:
        return self._begin(self.comm, vector)()

    def agreements(self) -> Agreements:
        comm = calls.duplicate(self.comm, self._watch)
        self._channels.append(comm)
        return _Agreements(partial(self._begin, comm))

    def _begin(self, comm: MPI.Intracomm, vector: Vector) -> Callable[[], Vector]:
        result = np.empty_like(vector)
        request = comm.Iallreduce(vector, result, MPI.MAX)
        told = [vector]  # MPI reads it until the wait is over, and nobody else keeps it

        def finish() -> Vector:
            # Counted when it is waited for: a step that others are in still completes without who has left after it.
            self._begun += 1
            self.wait(request, lambda: AGREEMENT)
            self._done += 1
            told.clear()
            return result

        return finish

    def all_gather_text(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(), np.uint8)
        own, sizes = (
            np.array([mine.size], np.int64),
            np.empty(self.size, np.int64),
        )  # which MPI reads until the wait is over
        self._begun += 1
        self.wait(self.comm.Iallgather(own, sizes), lambda: "the exchange of messages")
        longest = int(sizes.max())
        rows = np.zeros((self.size, longest), np.uint8)
        row = np.pad(mine, (0, longest - mine.size))
        self.wait(self.comm.Iallgather(row, rows), lambda: "the exchange of messages")
        self._done += 1
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def fail(self, message: str, buffers: object = None) -> None:
        if self._failure is None:
            self._failure = message
            self._notify(_FAILED, message)
        _LEFT.append((self, buffers))

    def leave(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
            self._notify(self._done, message)
            _LEFT.append(self)

    def abort(self, message: str) -> None:
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)
        calls.abort(self.comm, 1)

    def close(self) -> None:
        # After a failure messages may still be under way: the communicators must outlive them.
        if self._failure is None and not MPI.Is_finalized():
            self._failure = "it was closed"
            self._progress.close()
            for group in self._groups.values():
                group.free()
            for comm in (*self._channels, self.comm):
                calls.free(comm, self._watch)
            if self.notices is not None:
                calls.free(self.notices, self._watch)

    def _notify(self, rounds: int, message: str) -> None:
        """Sends a notice to all other ranks, short enough for MPI to buffer it, since no rank is sure to receive it."""
        if self.notices is None or MPI.Is_finalized():
            return
        notice = np.frombuffer(_ROUNDS.pack(rounds) + message.encode()[:_NOTICE_BYTES], np.uint8)
        peers = (peer for peer in range(self.size) if peer != self.rank)
        _LEFT.append([notice, *(self.notices.Isend([notice, MPI.BYTE], peer, _NOTICE) for peer in peers)])

    def _parts(self, buffer: Bytes) -> list[Bytes]:
        return [buffer[start : start + self.piece] for start in range(0, buffer.size, self.piece)]

    def _look(self) -> None:
        """Raises RankError where another rank has failed, or has left what this one waits for, or the launcher has ended."""
        while self.notices is not None and (notice := calls.receive(self.notices, _NOTICE)) is not None:
            rounds, text = _ROUNDS.unpack_from(notice)[0], notice[_ROUNDS.size :].decode(errors="ignore")
            if rounds == _FAILED:
                self._failure = self._failure or text
            self._left.append((rounds, text))
        if self._failure is None:
            self._failure = next((text for rounds, text in self._left if rounds < self._begun), None)
        if self._watch.orphaned:
            self._failure = self._failure or f"rank {self.rank}: the launcher of the job has ended"
        if self._interrupted is not None or self._failure is not None:
            raise RankError(self._interrupted or self._failure or "")


def _machine() -> str:
    """What tells this machine from others."""
    return f"{platform.node()} {text_of_system('/proc/sys/kernel/random/boot_id').strip()}"
