"""Arrivals and small AllReduces among the ranks of one machine, in memory that they share.

Each rank has a counter in a cache line of its own. A rank arrives by raising its counter, and knows that all have come when it sees
all counters raised. A small AllReduce is no more than that: each rank puts its values beside its counter before it raises it, and
reduces those of all when all have come.

The small AllReduce rests on stores becoming visible in the order in which they are made, as on x86: elsewhere a counter could be seen
before the values, and MPI's AllReduce is used. Where the environment of any rank has `PARTC_SHARED_MEMORY=0` nothing is shared: then MPI's
own barrier is used, too.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

import numpy as np
from mpi4py import MPI

from ..artifact.dtypes import Bytes
from ..artifact.format import ALL_REDUCE, MAX, SUM
from ..job.pauses import sleeps
from .mpi_memory import Wait, shared
from .mpi_watch import Watch
from .transport import CollectiveArgs, Request

VARIABLE = "PARTC_SHARED_MEMORY"
_LINE = 64
_SMALL = 1 << 15
"""An AllReduce of at most so many bytes goes by shared memory."""
_FEW = 8
"""Among at most so many ranks."""
_PROGRESS = 127
_FRESH, _LINGER = 0.5, 1.0
"""Seconds: how old a rank's knowledge of failures may be when it arrives, and how long one that has arrived stays."""
_CAME, _WITHDREW, _DECIDING, _MADE = range(4)
"""Rounds in a rank's line: its last arrival, its withdrawal, and of the first rank, on which it decides and that it has decided."""
_MOMENT = 1e-5
_ORDERED = platform.machine().lower() in ("x86_64", "amd64")


def wanted() -> bool:
    """Whether the environment lets this rank share memory with others."""
    return os.environ.get(VARIABLE, "1") != "0"


class Cell(Protocol):
    """Where a rank says how often it has arrived."""

    def __getitem__(self, at: int, /) -> int: ...


class Barrier(Protocol):
    """A rank's end of a barrier: `arrive` is one more round, which is over when no other cell is below `round`."""

    round: int
    others: Sequence[Cell]

    def arrive(self) -> None: ...
    def close(self) -> None: ...


class MpiBarrier:
    """MPI's barrier, whose one cell shows the round when all have come."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.round = 0
        self.others: Sequence[Cell] = [self]
        self._arrivals: MPI.Request = MPI.REQUEST_NULL

    def arrive(self) -> None:
        self.round += 1
        self._arrivals = self.comm.Ibarrier()

    def __getitem__(self, at: int, /) -> int:
        return self.round if self._arrivals.Test() else -1

    def close(self) -> None:
        self.others = []


class ShmBarrier:
    """Counters of arrivals, one for each rank, and memory beside them for small values."""

    def __init__(self, comm: MPI.Intracomm, memory: memoryview) -> None:
        self.comm = comm
        self.round = 0
        self.memory = memory
        self.cells = [memory[at : at + _LINE].cast("q") for at in range(0, _LINE * comm.size, _LINE)]
        self.others: Sequence[Cell] = [cell for rank, cell in enumerate(self.cells) if rank != comm.rank]
        self._held = Lock()
        self._held.acquire()

    @staticmethod
    def size(ranks: int) -> int:
        """The bytes of memory that so many ranks need."""
        return (_LINE + 2 * _SMALL * (ranks <= _FEW)) * ranks

    def arrive(self) -> None:
        self.round += 1
        self.cells[self.comm.rank][0] = self.round

    def fence(self) -> None:
        """What this rank has stored is seen by all before it loads anything more: a release and an acquire order both on x86 and ARM."""
        self._held.release()
        self._held.acquire()

    def takes(self, args: CollectiveArgs) -> bool:
        """Whether a collective is an AllReduce that is small enough."""
        few = 1 < self.comm.size <= _FEW
        return _ORDERED and few and args.op == ALL_REDUCE and 0 < args.target.size <= _SMALL

    def room(self, rank: int, parity: int, size: int) -> Bytes:
        """Memory for a rank's values; those of one round are read before any rank begins the next but one."""
        start = _LINE * self.comm.size + (2 * rank + parity) * _SMALL
        return np.frombuffer(self.memory, np.uint8, size, start)

    def close(self) -> None:
        for cell in self.cells:
            cell.release()
        self.cells, self.others = [], []


def make_barrier(comm: MPI.Intracomm, near: bool, wait: Wait) -> Barrier:
    """The barrier of a communicator, in shared memory where its ranks are `near`, on one machine, and can open it; collective."""
    memory = shared(comm, ShmBarrier.size(comm.size), wait) if near else None
    return MpiBarrier(comm) if memory is None else ShmBarrier(comm, memoryview(memory))


class OnceAllHaveCome:
    """A collective as a request: its test completes it when all ranks have arrived.

    A rank arrives when it first tests: it has begun by then whatever others may wait for.
    """

    def __init__(self, barrier: Barrier, comm: MPI.Intracomm) -> None:
        self.arrivals = barrier
        self.comm = comm
        self.others = barrier.others
        self.tests = 0
        self.here = False

    def begin(self) -> Request:
        """The request of one more round."""
        self.here = False
        return self

    def arrive(self) -> None:
        """Let the others know that this rank has come."""
        self.arrivals.arrive()

    def complete(self) -> None:
        """Do what all have come for."""
        raise NotImplementedError

    def Test(self) -> bool:
        if not self.here:
            self.arrive()
            self.here = True
        number = self.arrivals.round
        for cell in self.others:
            if cell[0] < number:
                self.tests += 1
                if self.tests & _PROGRESS == 0:
                    # Messages of this rank that are under way move only while MPI is called.
                    self.comm.Iprobe()
                return False
        self.complete()
        return True


class BlockingCollective(OnceAllHaveCome):
    """A call of MPI that blocks: made when all have come, it returns at once.

    Who has arrived must make the call once all have, for the others are inside, and nothing interrupts them there. Here that rests on
    times, as an arrival at MPI's barrier cannot be taken back. A rank that learns of a failure does not arrive, and one that has
    arrived by then stays for a second (`linger`): whoever has not heard of it comes within that time, since `look`, which raises where a
    rank has failed, is never older than half a second when a rank arrives. Who is held up for longer between the two is left inside.
    """

    def __init__(
        self,
        barrier: Barrier,
        comm: MPI.Intracomm,
        call: Callable[[], object],
        watch: Watch,
        what: str,
        look: Callable[[], object],
    ) -> None:
        super().__init__(barrier, comm)
        self.look = look
        self.looked = 0.0
        self.call = call
        self.called = False
        self.watch = watch
        self.what = lambda: what

    def begin(self) -> Request:
        self.called = False
        return super().begin()

    def arrive(self) -> None:
        now = time.monotonic()
        if now - self.looked > _FRESH:
            self.look()
            self.looked = now
        self.arrivals.arrive()

    def linger(self) -> None:
        """Makes the call with those who come within a second, where this rank has arrived and gives up for another's failure."""
        for _ in sleeps(1e-3, within=_LINGER):
            if not self.here or self.called or self.Test():
                return

    def complete(self) -> None:
        self.called = True
        self.watch.begin(self.what)
        self.call()
        self.watch.end()


class DecidedCollective(BlockingCollective):
    """A call of MPI that blocks, among ranks that share memory: the first of them decides alone whether it is made.

    When all have come it says that it decides, looks whether any has withdrawn, and says that the call is made or is not. Who gives
    up says that it withdraws, and looks whether the first rank is deciding. If it is not, it will see the withdrawal before it
    decides; if it is, it says a moment later what it has decided, and who withdraws makes the call with the others or goes. As each of the
    two makes its own store seen before it looks at the other's (`fence`), one of them sees the other's: no time matters.
    """

    def __init__(
        self, barrier: ShmBarrier, comm: MPI.Intracomm, call: Callable[[], object], watch: Watch, what: str
    ) -> None:
        super().__init__(barrier, comm, call, watch, what, lambda: None)
        self.mine, self.first = barrier.cells[comm.rank], barrier.cells[0]
        self.decides = comm.rank == 0
        self.fence = barrier.fence

    def arrive(self) -> None:
        self.arrivals.arrive()

    def Test(self) -> bool:
        if not self.here:
            self.arrive()
            self.here = True
        number = self.arrivals.round
        if self.decided(number) if self.decides else self.first[_MADE] >= number:
            self.complete()
            return True
        self.tests += 1
        if self.tests & _PROGRESS == 0:
            self.comm.Iprobe()
        return False

    def decided(self, number: int) -> bool:
        """Whether the call is made, as the first rank decides."""
        for cell in self.others:
            if cell[_CAME] < number:
                return False
        self.mine[_DECIDING] = number
        self.fence()
        if any(cell[_WITHDREW] >= number for cell in self.others):
            self.mine[_DECIDING] = 0
            return False
        self.mine[_MADE] = number
        return True

    def linger(self) -> None:
        """Withdraws, or makes the call where that is decided; where the first rank is killed as it decides, a second is enough."""
        if not self.here or self.called:
            return
        number = self.arrivals.round
        if self.decides:
            self.mine[_DECIDING] = self.mine[_MADE]
        else:
            self.mine[_WITHDREW] = number
        self.fence()
        for _ in sleeps(_MOMENT, within=_LINGER):
            if self.first[_MADE] >= number:
                self.complete()
                return
            if self.first[_DECIDING] != number:
                return


class ShmAllReduce(OnceAllHaveCome):
    """A small AllReduce: values lie beside the counters, and every rank reduces them in one order."""

    def __init__(self, barrier: ShmBarrier, comm: MPI.Intracomm, args: CollectiveArgs) -> None:
        super().__init__(barrier, comm)
        kind, size = args.dtype.numpy, args.target.size
        self.source = args.source.data
        self.target = args.target.view(kind)
        self.mine = [barrier.room(comm.rank, parity, size).data for parity in (0, 1)]
        self.cell = barrier.cells[comm.rank]
        terms = [[barrier.room(rank, parity, size).view(kind) for rank in range(comm.size)] for parity in (0, 1)]
        self.first, self.rest = [(row[0], row[1]) for row in terms], [tuple(row[2:]) for row in terms]
        self.reduce = np.add if args.reduce == SUM else np.maximum if args.reduce == MAX else np.minimum

    def arrive(self) -> None:
        number = self.arrivals.round = self.arrivals.round + 1
        self.mine[number & 1][:] = self.source
        self.cell[0] = number

    def complete(self) -> None:
        parity = self.arrivals.round & 1
        with np.errstate(over="ignore", invalid="ignore"):
            self.reduce(*self.first[parity], self.target)
            for term in self.rest[parity]:
                self.reduce(self.target, term, self.target)
