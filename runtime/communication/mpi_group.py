"""Collectives over MPI among one list of ranks: a communicator of their own, and a gate before calls that block.

A collective is MPI's non-blocking one, tested like a message. Where every rank waits for it as soon as it has begun, and has a
core of its own, it is MPI's blocking one, which is faster; but nothing interrupts a blocking call. So each rank first says that
it has arrived, and enters only when all have: whoever is late, or never comes, is waited for outside, where stalls and failures
are seen. The gate is a counter for each rank in memory that the ranks of one machine share, MPI's barrier where they do not.
A small AllReduce needs no more than the gate: each rank puts its values beside its counter, and reduces those of all.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from mpi4py import MPI

from ..artifact.dtypes import Bytes
from ..artifact.format import ALL_REDUCE, MAX, SUM
from . import mpi_calls as calls
from .mpi_memory import Wait, shared
from .mpi_watch import Watch
from .transport import CollectiveArgs, Request

_LINE = 64
_PROGRESS = 127
_SMALL = 1 << 15
_FEW = 8
# Elsewhere a counter could be seen before the values that were written first.
_ORDERED = platform.machine().lower() in ("x86_64", "amd64")


class ProcessGroup:
    """The ranks of one list with their communicator; making it and freeing it are collective among them.

    `near`: they are on one machine.
    """

    def __init__(
        self, world: MPI.Intracomm, ranks: Sequence[int], tag: int, near: bool, watch: Watch, wait: Wait
    ) -> None:
        self.comm = calls.among(world, ranks, tag, watch)
        self.watch = watch
        self.gate = ShmBarrier(self.comm, near, wait)
        self._names = ", ".join(map(str, ranks))

    def ready(self, movement: CollectiveArgs) -> Callable[[], Request]:
        """What begins the collective."""
        comm = self.comm
        if movement.at_once and self._is_small(movement):
            return ShmAllReduce(self.gate, comm, movement).begin
        if movement.at_once:
            what = f"{movement.op} among ranks {self._names}, which have all come"
            return BlockingCollective(self.gate, comm, calls.call(comm, movement, True), self.watch, what).begin
        return calls.call(comm, movement, False)

    def _is_small(self, movement: CollectiveArgs) -> bool:
        few, ordered = 1 < self.comm.size <= _FEW, _ORDERED and self.gate.memory is not None
        return few and ordered and movement.op == ALL_REDUCE and 0 < movement.target.size <= _SMALL

    def free(self) -> None:
        """Give back the communicator."""
        self.gate.close()
        calls.free(self.comm, self.watch)


class _Tested(Protocol):
    def Test(self) -> bool: ...


class ShmBarrier:
    """Counters of arrivals, one for each rank, each in a cache line of its own."""

    def __init__(self, comm: MPI.Intracomm, near: bool, wait: Wait) -> None:
        size = (_LINE + 2 * _SMALL * (comm.size <= _FEW)) * comm.size
        self.comm = comm
        self.round = 0
        self.memory = shared(comm, size, wait) if near else None
        self.cells: list[memoryview] = []
        if self.memory is not None:
            whole = memoryview(self.memory)
            self.cells = [whole[at : at + 8].cast("q") for at in range(0, _LINE * comm.size, _LINE)]
            whole.release()
        self.others = [cell for rank, cell in enumerate(self.cells) if rank != comm.rank]
        self.arrivals: _Tested | None = None

    def arrive(self) -> None:
        if self.memory is None:
            self.arrivals = self.comm.Ibarrier()
        else:
            self.round += 1
            self.cells[self.comm.rank][0] = self.round

    def open(self) -> bool:
        if self.arrivals is not None:
            return self.arrivals.Test()
        for cell in self.others:  # noqa: SIM110 - a generator would take as long as the call behind the gate
            if cell[0] < self.round:
                return False
        return True

    def room(self, rank: int, parity: int, size: int) -> Bytes:
        """Memory for small values of a rank; those of one round are read before anybody begins the next but one."""
        assert self.memory is not None
        start = _LINE * self.comm.size + (2 * rank + parity) * _SMALL
        return np.frombuffer(self.memory, np.uint8, size, start)

    def close(self) -> None:
        for cell in self.cells:
            cell.release()
        self.cells, self.others = [], []


class BlockingCollective:
    """A blocking collective as a request: its test makes the call once all ranks have arrived.

    A rank arrives when it first tests: it has begun by then whatever others may wait for.
    """

    def __init__(
        self, gate: ShmBarrier, comm: MPI.Intracomm, call: Callable[[], object], watch: Watch, what: str
    ) -> None:
        self.gate = gate
        self.comm = comm
        self.call = call
        self.watch = watch
        self.what = lambda: what
        self.tests = 0
        self.here = False

    def begin(self) -> Request:
        self.here = False
        return self

    def Test(self) -> bool:
        if not self.here:
            self.here = True
            self.gate.arrive()
        if self.gate.open():
            self.watch.begin(self.what)
            self.call()
            self.watch.end()
            return True
        self.tests += 1
        if self.tests & _PROGRESS == 0:
            # Messages of this rank that are under way move only while MPI is called.
            self.comm.Iprobe()
        return False


class ShmAllReduce:
    """An AllReduce by way of the gate: values lie beside the counters, and every rank reduces them in one order."""

    def __init__(self, gate: ShmBarrier, comm: MPI.Intracomm, movement: CollectiveArgs) -> None:
        kind, size = movement.dtype.numpy, movement.target.size
        self.gate = gate
        self.comm = comm
        self.others = gate.others
        self.source = movement.source.data
        self.target = movement.target.view(kind)
        self.mine = [gate.room(comm.rank, parity, size).data for parity in (0, 1)]
        self.cell = gate.cells[comm.rank]
        terms = [[gate.room(rank, parity, size).view(kind) for rank in range(comm.size)] for parity in (0, 1)]
        self.first, self.rest = [(row[0], row[1]) for row in terms], [tuple(row[2:]) for row in terms]
        self.reduce = np.add if movement.reduce == SUM else np.maximum if movement.reduce == MAX else np.minimum
        self.tests = 0
        self.here = False

    def begin(self) -> Request:
        self.here = False
        return self

    def Test(self) -> bool:
        if not self.here:
            self.here = True
            number = self.gate.round = self.gate.round + 1
            self.mine[number & 1][:] = self.source
            self.cell[0] = number
        number = self.gate.round
        for cell in self.others:
            if cell[0] < number:
                self.tests += 1
                if self.tests & _PROGRESS == 0:
                    self.comm.Iprobe()
                return False
        self.reduce(*self.first[number & 1], self.target)
        for term in self.rest[number & 1]:
            self.reduce(self.target, term, self.target)
        return True
