"""Collectives over MPI among one list of ranks: a communicator of their own, and a gate before calls that block.

A collective is MPI's non-blocking one, tested like a message. Where every rank waits for it as soon as it has begun, and has a
core of its own, it is MPI's blocking one, which is faster; but nothing interrupts a blocking call. So each rank first says that
it has arrived, and enters only when all have: whoever is late, or never comes, is waited for outside, where stalls and failures
are seen. The gate is a counter for each rank in memory that the ranks of one machine share, MPI's barrier where they do not.
A small AllReduce needs no more than the gate: each rank puts its values beside its counter, and reduces those of all.

MPI reduces what it gives to all ranks in the same bits: integers, and sums of floats. A maximum of floats is not among them,
because for NaN and for zeros of two signs MPI's depends on the order of the operands.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from mpi4py import MPI

from .dtypes import Bytes, Dtype
from .errors import RankError
from .format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MAX, REDUCE_SCATTER, REDUCE_TO, SUM
from .transport import GATHER, Movement, Request

_LINE = 64
_PROGRESS = 127
_SMALL = 1 << 15
_FEW = 8
_CHUNK = 1 << 22
"""Bytes that are reduced at once: Open MPI takes longer for a large array than for its pieces."""
# Elsewhere a counter could be seen before the values that were written first.
_ORDERED = platform.machine().lower() in ("x86_64", "amd64")
_COUNTS = (1 << 31) - 1

_TYPES = {
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
}
_UNITS = ((8, MPI.UINT64_T), (4, MPI.UINT32_T), (2, MPI.UINT16_T), (1, MPI.UINT8_T))

Spec = tuple[Bytes, int, MPI.Datatype]


def reduces(dtype: Dtype, reduce: str) -> bool:
    """Whether MPI reduces the type, in the same bits for all."""
    return dtype.shown in _TYPES and (reduce == SUM or dtype.shown.startswith(("int", "uint")))


class Circle:
    """The ranks of one list with their communicator; making it and freeing it are collective among them."""

    def __init__(self, world: MPI.Intracomm, ranks: Sequence[int], tag: int) -> None:
        everyone = world.Get_group()
        mine = everyone.Incl(list(ranks))
        self.comm = world.Create_group(mine, tag)
        mine.Free()
        everyone.Free()
        self.gate = _Gate(self.comm)

    def ready(self, movement: Movement) -> Callable[[], Request]:
        """What begins the collective."""
        comm = self.comm
        if movement.at_once and self._is_small(movement):
            return _Small(self.gate, comm, movement).begin
        if movement.at_once:
            gated = _Gated(self.gate, comm, _call(comm, movement, True))
            return gated.begin
        return _call(comm, movement, False)

    def _is_small(self, movement: Movement) -> bool:
        few, ordered = 1 < self.comm.size <= _FEW, _ORDERED and self.gate.memory is not None
        return few and ordered and movement.op == ALL_REDUCE and 0 < movement.target.size <= _SMALL

    def free(self) -> None:
        """Give back the communicator."""
        self.gate.close()
        self.comm.Free()


class _Tested(Protocol):
    def Test(self) -> bool: ...


class _Gate:
    """Counters of arrivals, one for each rank, each in a cache line of its own."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.round = 0
        self.memory = _shared(comm)
        self.cells: list[memoryview] = []
        if self.memory is not None:
            whole = memoryview(self.memory)
            self.cells = [whole[at : at + 8].cast("q") for at in range(0, _LINE * comm.size, _LINE)]
            whole.release()
        self.others = [cell for rank, cell in enumerate(self.cells) if rank != comm.rank]
        self.barrier: _Tested | None = None

    def arrive(self) -> None:
        if self.memory is None:
            self.barrier = self.comm.Ibarrier()
        else:
            self.round += 1
            self.cells[self.comm.rank][0] = self.round

    def open(self) -> bool:
        if self.barrier is not None:
            return self.barrier.Test()
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


class _Gated:
    """A blocking collective as a request: its test makes the call once all ranks have arrived.

    A rank arrives when it first tests: it has begun by then whatever others may wait for.
    """

    def __init__(self, gate: _Gate, comm: MPI.Intracomm, call: Callable[[], object]) -> None:
        self.gate = gate
        self.comm = comm
        self.call = call
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
            self.call()
            return True
        self.tests += 1
        if self.tests & _PROGRESS == 0:
            # Messages of this rank that are under way move only while MPI is called.
            self.comm.Iprobe()
        return False


class _Small:
    """An AllReduce by way of the gate: values lie beside the counters, and every rank reduces them in one order."""

    def __init__(self, gate: _Gate, comm: MPI.Intracomm, movement: Movement) -> None:
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


def _call(comm: MPI.Intracomm, movement: Movement, blocking: bool) -> Callable[[], Request]:
    """MPI's call for a collective, with its buffers."""
    source, target, ranks = movement.source, movement.target, len(movement.ranks)
    if movement.op == REDUCE_TO:
        return _reduce_to(comm, movement, blocking)
    if movement.op in (ALL_REDUCE, REDUCE_SCATTER):
        kind = _TYPES[movement.dtype.shown]
        operation = _operation(movement)
        into = _spec(target, kind)
        same = source.ctypes.data == target.ctypes.data
        given = MPI.IN_PLACE if same and movement.op == ALL_REDUCE else _spec(source, kind)
        if movement.op == ALL_REDUCE:
            if blocking and same:
                pieces = [_spec(target[at : at + _CHUNK], kind) for at in range(0, target.size, _CHUNK)]

                def reduce_pieces() -> None:
                    for piece in pieces:
                        comm.Allreduce(given, piece, operation)

                return reduce_pieces
            reduce = comm.Allreduce if blocking else comm.Iallreduce
            return lambda: reduce(given, into, operation)
        scatter = comm.Reduce_scatter_block if blocking else comm.Ireduce_scatter_block
        # mpi4py wants the count of a block on both sides.
        return lambda: scatter((source, into[1], kind), into, operation)
    if movement.op == GATHER:
        width, unit = _unit(source)
        given = (source, source.size // width, unit)
        taken = (target, source.size // width, unit) if target.size else None
        collect = comm.Gather if blocking else comm.Igather
        return lambda: collect(given, taken, movement.root)
    block = target if movement.op not in (ALL_GATHER, ALL_TO_ALL) else target[: target.size // ranks]
    width, unit = _unit(block)
    whole = (target, target.size // width, unit)
    if movement.op == ALL_GATHER:
        gather = comm.Allgather if blocking else comm.Iallgather
        return lambda: gather((source, source.size // width, unit), (target, block.size // width, unit))
    if movement.op == ALL_TO_ALL:
        every = block.size // width
        exchange = comm.Alltoall if blocking else comm.Ialltoall
        return lambda: exchange((source, every, unit), (target, every, unit))
    broadcast = comm.Bcast if blocking else comm.Ibcast
    return lambda: broadcast(whole, movement.root)


def _reduce_to(comm: MPI.Intracomm, movement: Movement, blocking: bool) -> Callable[[], Request]:
    """MPI's call for a Reduce; only the root has a target."""
    source, target, kind = movement.source, movement.target, _TYPES[movement.dtype.shown]
    given, into = _spec(source, kind), _spec(target, kind) if comm.rank == movement.root else None
    same = comm.rank == movement.root and source.ctypes.data == target.ctypes.data
    reduce, operation = comm.Reduce if blocking else comm.Ireduce, _operation(movement)
    return lambda: reduce(MPI.IN_PLACE if same else given, into, operation, movement.root)


def _operation(movement: Movement) -> MPI.Op:
    return MPI.SUM if movement.reduce == SUM else MPI.MAX if movement.reduce == MAX else MPI.MIN


def _unit(block: Bytes) -> tuple[int, MPI.Datatype]:
    """The widest of MPI's units of which a block is made."""
    width, unit = next(row for row in _UNITS if block.size % row[0] == 0)
    if block.size // width > _COUNTS:
        raise RankError(f"a collective moves blocks of {block.size} bytes, and MPI counts to {_COUNTS} of {width}")
    return width, unit


def _spec(data: Bytes, kind: MPI.Datatype) -> Spec:
    count = data.size // kind.Get_size()
    if count > _COUNTS:
        raise RankError(f"a collective reduces {count} elements, and MPI counts to {_COUNTS}")
    return data, count, kind


def _shared(comm: MPI.Intracomm) -> mmap.mmap | None:
    """Memory, cleared, that all ranks of the communicator share; None where they are not on one machine."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = here.size == comm.size
    here.Free()
    if not comm.allreduce(together, MPI.LAND):
        return None
    size = (_LINE + 2 * _SMALL * (comm.size <= _FEW)) * comm.size
    path: str | None = None
    memory: mmap.mmap | None = None
    with contextlib.suppress(OSError):
        if comm.rank == 0:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            handle, path = tempfile.mkstemp(prefix="partc-", dir=folder)
            os.truncate(handle, size)
            memory = mmap.mmap(handle, size)
            os.close(handle)
    path = comm.bcast(path)
    if comm.rank != 0 and path is not None:
        with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
    everyone = comm.allreduce(memory is not None, MPI.LAND)
    if comm.rank == 0 and path is not None:
        os.unlink(path)
    return memory if everyone else None
