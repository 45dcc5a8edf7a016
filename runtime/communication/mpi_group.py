"""Collectives over MPI among one list of ranks: a communicator of their own, and a barrier before calls that block.

A collective is MPI's non-blocking one, tested like a message. Where every rank waits for it as soon as it has begun, and has a
core of its own, it is MPI's blocking one, which is faster; but nothing interrupts a blocking call. So each rank first says that
it has arrived, and enters only when all have: whoever is late, or never comes, is waited for outside, where stalls and failures
are seen (`mpi_arrivals.py`). Between hosts a large one takes so long that a call that blocks gains nothing, and spins for all of it.
Ranks that share a host and its memory have no need of this (`host/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from ..artifact.format import BROADCAST
from . import mpi_calls as calls
from .mpi_arrivals import BlockingCollective, MpiBarrier
from .mpi_watch import Watch
from .transport import CollectiveArgs, Request

_LARGE = 1 << 20
"""Bytes that are large between hosts: 10 Gbit/s move them in a millisecond."""


class ProcessGroup:
    """The ranks of one list with their communicator; making it and freeing it are collective among them.

    `crosses`: whether they are on several hosts.
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
        """What begins the collective."""
        size = (args.target if args.op == BROADCAST else args.source).size  # the same on every rank
        if not args.at_once or (self.crosses and size >= _LARGE):
            return calls.call(self.comm, args, False)
        what = f"{args.op} among ranks {self._names}, which have all come"
        call = calls.call(self.comm, args, True)
        return BlockingCollective(self.arrivals, call, self.watch, what, self.look).begin

    def free(self) -> None:
        """Give back the communicator."""
        calls.free(self.comm, self.watch)
