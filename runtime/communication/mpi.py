"""Ranks as MPI processes, by mpi4py, on a communicator of the runtime's own.

Ranks of one host send, reduce and agree in memory that they share (`host/plane.py`). MPI carries the communication between hosts, all
communication where memory cannot be shared, and the notices of failures. A wait for MPI tests for a moment and then sleeps, because MPI
cannot wake it: first 20 microseconds, then twice as long each time, up to a tenth of a millisecond, or a whole one in a long wait.
Meanwhile a rank checks whether another one has failed or left. A rank that leaves sends the number of agreements, exchanges and steps of
all ranks in which it took part; a rank that waits for a later one gets an error. MPI counts in 32-bit integers, so that a longer message is
split into several.

Collectives over MPI among one list of ranks have a communicator of their own, and a barrier before calls that block.

A collective is MPI's non-blocking one, tested like a message. Where every rank waits for it directly after its begin, and has a core of its
own, it is MPI's blocking one, which is faster; but nothing interrupts a blocking call. So each rank first signals that it has arrived, and
enters the call only when all have: a rank that is late, or never comes, is waited for outside, where stalls and failures are noticed
(`MpiBarrier`). Between hosts a large collective takes so long that a blocking call gains nothing, and spins for all of it. Ranks that
share a host and its memory do not need this (`host/`).

Makes MPI's blocking calls only when all ranks have come: stalls and failures are noticed before the call, and not inside it.
"""

from __future__ import annotations

import json
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
from mpi4py import MPI
from partc.runtime.artifact.tensors.dtypes import BY_NAME, Bytes, Dtype

from ..artifact.format import ALL_GATHER, BROADCAST, REDUCE_SCATTER
from ..errors import RankError
from ..files.regular import text_of_system
from ..job.machine import core_limit, usable_cores
from ..job.parking import Futex, sleeps, spins
from ..job.progress import Progress
from ..job.status_board import processes
from . import mpi_calls as calls
from .host.plane import DataPlane, HostAgreements, HostRequest, RankList
from .host.segment import Segment
from .leaving import expected
from .mpi_watch import Watch
from .transport import AGREEMENT, Agreements, CollectiveArgs, Request, Vector

_LARGE = 1 << 20
"""The least bytes of a large collective between hosts: 10 Gbit/s move them in a millisecond."""


class ProcessGroup:
    """The communicator of the ranks of one list; creating and freeing it is collective among them.

    `crosses`: whether the ranks are on several hosts.
    """

    def __init__(
        self,
        world: MPI.Intracomm,
        ranks: Sequence[int],
        tag: int,
        watch: Watch,
        look: Callable[[], object],
        crosses: bool,
    ) -> None:
        self.comm = calls.among(world, ranks, tag, watch)
        self.watch = watch
        self.look = look
        self.crosses = crosses
        self.arrivals = MpiBarrier(self.comm)
        self._names = ", ".join(map(str, ranks))

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        """Returns the function that begins the collective."""
        size = (args.target if args.op == BROADCAST else args.source).size  # the same on every rank
        if not args.at_once or (self.crosses and size >= _LARGE):
            return calls.call(self.comm, args, False)
        what = f"{args.op} among ranks {self._names}, which have all come"
        call = calls.call(self.comm, args, True)
        return BlockingCollective(self.arrivals, call, self.watch, what, self.look).begin

    def free(self) -> None:
        """Frees the communicator."""
        calls.free(self.comm, self.watch)


VARIABLE = "PARTC_SHARED_MEMORY"
_PIECE = 1 << 30
_SPIN = 5e-5
_SHORTEST_SLEEP = 2e-5
_LONGEST_SLEEP = 1e-4
_BETWEEN_LOOKS = 2e-3
_NOTICE = 1
_NOTICE_BYTES = 3000
_ROUNDS = struct.Struct("<q")
_FAILED = -1
_LEFT: list[object] = []
"""The objects that messages under way may still access after a failure; they are never freed."""


class _ManyRequests:
    """A message that is sent as several messages."""

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
        self.tags: int = cast(int, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        self.notices: MPI.Intracomm | None = None
        self._processes: Mapping[int, int] = processes()
        self._watch = Watch(self.rank, stall, lambda: self._processes)
        self._plane: DataPlane | None = None
        self._agreed: HostAgreements | None = None
        self._everyone: RankList | None = None
        self.mpi_alone = ""
        """The reason why ranks of one host use MPI among themselves; empty where they share memory, or where no two ranks share a host."""
        self._failure: str | None = None
        self._interrupted: str | None = None
        self._left: list[tuple[int, str]] = []
        self._begun = self._done = 0
        """The numbers of agreements, exchanges and steps of all ranks that this rank has begun, and that it has completed."""
        self._known: set[tuple[int, ...]] = set()
        self._groups: dict[tuple[int, ...], ProcessGroup | RankList] = {}
        self._channels: list[MPI.Intracomm] = []
        self.wait(comm.Ibarrier(), lambda: "all ranks to begin to load")
        self.comm = calls.duplicate(comm, self._watch)
        self.notices = calls.duplicate(comm, self._watch)
        # This communicator has no pending messages; one would end a probe before it makes progress with others.
        self._probe = partial(self.notices.Iprobe, MPI.ANY_SOURCE, _NOTICE)
        self._progress = Progress(self._go_on, MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        expected(self)
        self._meet()

    def _meet(self) -> None:
        """Finds the ranks on this machine and the number of cores for each, and shares memory with those ranks."""
        segment, futex, problem = _shared_memory()
        machine = f"{platform.node()} {text_of_system('/proc/sys/kernel/random/boot_id').strip()}"
        mine = [
            machine,
            os.getpid(),
            sorted(usable_cores()),
            core_limit(),
            problem,
            segment.address if segment is not None else [],
        ]
        rows = [json.loads(text) for text in self.all_gather_text(json.dumps(mine))]
        self._machines = [row[0] for row in rows]
        near = [rank for rank, one in enumerate(self._machines) if one == machine]
        self._processes = {rank: rows[rank][1] for rank in near}
        cores = min(len(frozenset().union(*(rows[rank][2] for rank in near))), *(rows[rank][3] for rank in near))
        self.cores = min(len(usable_cores()), max(1, cores // len(near)))
        self.place = near.index(self.rank)
        self.shares_host = len(near) > 1
        self.single_host = len(near) == self.size
        self.has_own_core = len(near) <= cores
        if len(set(self._machines)) < self.size:
            problem = next((f"rank {rank}: {row[4]}" for rank, row in enumerate(rows) if row[4]), "")
            if segment is not None and not problem and self.place:
                try:
                    segment.adopt(*rows[near[0]][5])
                except OSError as error:
                    problem = f"rank {self.rank}: {error}"
            self.mpi_alone = next((text for text in self.all_gather_text(problem) if text), "")
        if segment is None or futex is None or self.mpi_alone or not self.shares_host:
            if segment is not None:
                segment.close()
            return
        place, alone = self.place, self.single_host
        self._plane = DataPlane(segment, futex, near, place, self.has_own_core, alone, self._watch, self._look)
        if self.single_host:
            self._everyone = self._plane.list_of(near)
            self._agreed = self._agreements_in_memory()

    def _agreements_in_memory(self) -> HostAgreements | None:
        """Returns agreements of all ranks in shared memory, None if they are on several hosts; all ranks create them in the same order."""
        if self._plane is None or not self.single_host:
            return None
        everyone = tuple(range(self.size))
        among = self._plane.list_of(everyone)
        return HostAgreements(among, everyone) if among is not None else None

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        if self._plane is not None and peer in self._plane.places:
            return self._plane.isend(buffer, peer, tag)
        if buffer.size > self.piece:
            return _ManyRequests([self.comm.Isend([part, MPI.BYTE], peer, tag) for part in self._messages_of(buffer)])
        return self.comm.Isend([buffer, MPI.BYTE], peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Request:
        if self._plane is not None and peer in self._plane.places:
            return self._plane.irecv(buffer, peer, tag)
        if buffer.size > self.piece:
            return _ManyRequests([self.comm.Irecv([part, MPI.BYTE], peer, tag) for part in self._messages_of(buffer)])
        return self.comm.Irecv([buffer, MPI.BYTE], peer, tag)

    def wait(self, request: Request, what: Callable[[], str]) -> None:
        if isinstance(request, HostRequest) and self._plane is not None:
            if not request.done:
                self._plane.wait(request, what)
            return
        test: Callable[[], bool] = request.Test  # type: ignore[attr-defined]
        for _ in spins(_SPIN):
            if test():
                return
        self._watch.begin(what)
        try:
            look = 0.0
            for waited in sleeps(_SHORTEST_SLEEP, _LONGEST_SLEEP):
                if test():
                    break
                if self._plane is not None:
                    self._plane.progress()
                if waited >= look:
                    self._look()
                    look = waited + _BETWEEN_LOOKS
        except BaseException:
            if isinstance(request, BlockingCollective):
                request.linger()
            # MPI may still write to the buffers of a request whose wait has failed.
            _LEFT.append(request)
            raise
        finally:
            self._watch.end()

    def interrupt(self, message: str) -> None:
        self._interrupted = self._interrupted or message
        if self._plane is not None:
            self._plane.wake_own()

    def with_progress(self, action: Callable[[], object]) -> Callable[[], object]:
        accompanied, plane = self._progress.during(action), self._plane
        if plane is None or not self.single_host:
            return accompanied
        return lambda: accompanied() if plane.under_way else action()

    def create_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        for index, ranks in enumerate(groups):
            if ranks in self._known:
                continue
            self._known.add(ranks)
            machines = {self._machines[rank] for rank in ranks}
            if self._plane is not None and len(machines) == 1:
                if machines == {self._machines[self.rank]} and (found := self._plane.list_of(ranks)) is not None:
                    self._groups[ranks] = found
            elif self.rank in ranks:
                crosses = len(machines) > 1
                self._groups[ranks] = ProcessGroup(
                    self.comm, ranks, index % self.tags, self._watch, self._look, crosses
                )

    def reduces(self, op: str, ranks: Sequence[int], dtype: Dtype, reduce: str) -> bool:
        # MPI's non-blocking ReduceScatter sums everything on one rank; the shards that ranks need of each other are a third of its bytes.
        moved = op == REDUCE_SCATTER and len({self._machines[rank] for rank in ranks}) > 1
        return calls.reduces(dtype, reduce) and not moved

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        return self._groups[args.ranks].prepare(args)

    def all_reduce_max(self, vector: Vector) -> Vector:
        return self._begin(self.comm, self._agreed, vector)()

    def count_step(self) -> None:
        self._begun += 1
        self._done += 1

    def agreements(self) -> Agreements:
        if (own := self._agreements_in_memory()) is not None:
            return _Agreements(partial(self._begin, self.comm, own))
        comm = calls.duplicate(self.comm, self._watch)
        self._channels.append(comm)
        return _Agreements(partial(self._begin, comm, None))

    def _begin(self, comm: MPI.Intracomm, near: HostAgreements | None, vector: Vector) -> Callable[[], Vector]:
        request: Request
        if near is not None:
            request, result = near.begin(vector)
        else:
            result = np.empty_like(vector)
            request = comm.Iallreduce(vector, result, MPI.MAX)
        reading = [vector]  # a reference, because MPI reads the vector until the wait is over

        def finish() -> Vector:
            # Counted at the wait: a step that has begun still completes without a rank that left after it.
            self._begun += 1
            self.wait(request, lambda: AGREEMENT)
            self._done += 1
            reading.clear()
            return result if near is None else result.copy()

        return finish

    def all_gather_text(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(), np.uint8)
        self._begun += 1
        sizes = self._gathered(np.array([mine.size], np.int64).view(np.uint8)).view(np.int64)
        longest = int(sizes.max())
        rows = self._gathered(np.pad(mine, (0, longest - mine.size))).reshape(self.size, longest)
        self._done += 1
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def _gathered(self, own: Bytes) -> Bytes:
        """Returns the bytes of every rank, `own.size` of each, in the order of the ranks."""
        gathered = np.empty(self.size * own.size, np.uint8)
        request: Request
        if self._everyone is not None:
            args = CollectiveArgs(ALL_GATHER, tuple(range(self.size)), 0, own, gathered, BY_NAME["uint8"])
            request = self._everyone.prepare(args)()
        else:
            request = self.comm.Iallgather(own, gathered)
        self.wait(request, lambda: "the exchange of messages")
        return gathered

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
                if isinstance(group, ProcessGroup):
                    group.free()
            if self._plane is not None:
                self._plane.close()
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
        if self._plane is not None:
            self._plane.wake_all()

    def _go_on(self) -> None:
        """Makes progress with all communication under way."""
        self._probe()
        if self._plane is not None:
            self._plane.progress()

    def _messages_of(self, buffer: Bytes) -> list[Bytes]:
        return [buffer[start : start + self.piece] for start in range(0, buffer.size, self.piece)]

    def _look(self) -> None:
        """Raises RankError if another rank has failed, or left before communication that this one needs, or if the launcher has ended."""
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


def _shared_memory() -> tuple[Segment | None, Futex | None, str]:
    """Returns this rank's segment and futex for sharing memory with the ranks of its host; if it has none, the reason as a text."""
    if os.environ.get(VARIABLE, "1") == "0":
        return None, None, f"{VARIABLE}=0"
    try:
        futex = Futex()
        return Segment(), futex, ""
    except (OSError, AttributeError) as error:
        return None, None, str(error)


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
