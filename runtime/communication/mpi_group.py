"""Collectives over MPI among one list of ranks: a communicator of their own, and a barrier before calls that block.

A collective is MPI's non-blocking one, tested like a message. Where every rank waits for it as soon as it has begun, and has a
core of its own, it is MPI's blocking one, which is faster; but nothing interrupts a blocking call. So each rank first says that
it has arrived, and enters only when all have: whoever is late, or never comes, is waited for outside, where stalls and failures
are seen (`shared_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from . import mpi_calls as calls
from .mpi_memory import Wait
from .mpi_watch import Watch
from .shared_memory import BlockingCollective, DecidedCollective, ShmAllReduce, ShmBarrier, make_barrier
from .transport import CollectiveArgs, Request


class ProcessGroup:
    """The ranks of one list with their communicator; making it and freeing it are collective among them.

    `near`: they are on one machine, and share memory.
    """

    def __init__(
        self,
        world: MPI.Intracomm,
        ranks: Sequence[int],
        tag: int,
        near: bool,
        watch: Watch,
        wait: Wait,
        look: Callable[[], object],
    ) -> None:
        self.comm = calls.among(world, ranks, tag, watch)
        self.watch = watch
        self.look = look
        self.arrivals = make_barrier(self.comm, near, wait)
        self._names = ", ".join(map(str, ranks))

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        """What begins the collective."""
        comm, barrier = self.comm, self.arrivals
        if not args.at_once:
            return calls.call(comm, args, False)
        if isinstance(barrier, ShmBarrier) and barrier.takes(args):
            return ShmAllReduce(barrier, comm, args).begin
        what = f"{args.op} among ranks {self._names}, which have all come"
        call = calls.call(comm, args, True)
        if isinstance(barrier, ShmBarrier):
            return DecidedCollective(barrier, comm, call, self.watch, what).begin
        return BlockingCollective(barrier, comm, call, self.watch, what, self.look).begin

    def free(self) -> None:
        """Give back the communicator."""
        self.arrivals.close()
        calls.free(self.comm, self.watch)
