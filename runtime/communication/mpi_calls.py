"""Every call of MPI that may block is in this file: no other file of partc makes one, which a test checks.

Nothing interrupts a call that blocks. So each is made while a `Watch` observes it, or where it is known to return at once: after all ranks
have come, or for a message that has arrived. MPI's calls for collectives are here in both forms.

MPI reduces integers, and sums of floats, because every rank gets the same bits of these. It does not reduce maxima of floats here: for NaN,
and for zeros of two signs, MPI's result depends on the order of the operands.

The settings of Open MPI are variables of the environment; where they are set already they stay.

The first setting lets its waits yield their cores; the others use both directions of a network at once. On a single connection between two
ranks, a rank's permission for a large message to come waits until a large message that it sends has left. For a non-blocking sum among two
or three ranks Open MPI itself adds on one rank, which sends the sum back; Rabenseifner's algorithm sends as few bytes for any number of
ranks, in both directions at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

from mpi4py import MPI
from partc.runtime.artifact.tensors.dtypes import Bytes, Dtype

from ..artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, MAX, REDUCE_SCATTER, REDUCE_TO, SUM
from ..errors import RankError
from ..job.place import is_launched, refuse_alone, refuse_inherited, refuse_pmix
from .mpi_watch import Watch
from .transport import GATHER, CollectiveArgs, Request

_SETTINGS = (
    ("OMPI_MCA_mpi_yield_when_idle", "1", 1),
    ("OMPI_MCA_btl_tcp_links", "2", 1),
    ("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "rabenseifner", 5),
)
"""Name, value, and the first version of Open MPI that gets it: an older one may not know the value, and prints a long message."""


def settings(version: int) -> dict[str, str]:
    """Returns the variables for a version of Open MPI; other MPI libraries ignore them."""
    return {name: value for name, value, since in _SETTINGS if version >= since}


_CHUNK = 1 << 22
"""The bytes that are reduced at once: Open MPI takes longer for a large array than for its chunks."""
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
    """Whether MPI reduces the type with the same bits on all ranks."""
    return dtype.shown in _TYPES and (reduce == SUM or dtype.shown.startswith(("int", "uint")))


def begin(watch: Watch) -> MPI.Intracomm:
    """Starts MPI, unless the import of mpi4py did (`mpi4py.rc.initialize`), and returns the communicator of all ranks.

    It uses ctypes, so that other threads of Python run meanwhile; mpi4py would block them. Open MPI's own waits yield their cores, like
    those of `pauses`, and non-blocking sums use both directions, unless the environment sets these differently.
    """
    if not MPI.Is_initialized():
        refuse_inherited(os.environ)
        refuse_pmix(os.environ, MPI.Get_library_version())
        maker, version = MPI.get_vendor()
        for name, value in settings(version[0]).items():
            os.environ.setdefault(name, value)
        library = ctypes.CDLL(MPI.__file__)
        with watch.during(lambda: "the start of MPI, for which all ranks must have begun"):
            library.MPI_Init_thread(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        refuse_alone(os.environ, MPI.COMM_WORLD.size, " ".join((maker, ".".join(map(str, version)))), is_launched())
    return MPI.COMM_WORLD


def end(watch: Watch) -> None:
    """Ends MPI; all ranks call it."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        library = ctypes.CDLL(MPI.__file__)
        with watch.during(lambda: "the end of MPI, for which all ranks must have ended"):
            library.MPI_Finalize()


def duplicate(comm: MPI.Intracomm, watch: Watch) -> MPI.Intracomm:
    """Returns a new communicator of the same ranks; collective."""
    with watch.during(lambda: "a communicator of all ranks"):
        return comm.Dup()


def among(world: MPI.Intracomm, ranks: Sequence[int], tag: int, watch: Watch) -> MPI.Intracomm:
    """Returns a new communicator of some ranks; collective among them."""
    everyone = world.Get_group()
    mine = everyone.Incl(list(ranks))
    with watch.during(lambda: f"a communicator of ranks {', '.join(map(str, ranks))}"):
        comm = world.Create_group(mine, tag)
    mine.Free()
    everyone.Free()
    return comm


def free(comm: MPI.Intracomm, watch: Watch) -> None:
    """Frees a communicator; collective."""
    with watch.during(lambda: "the end of a communicator"):
        comm.Free()


def receive(comm: MPI.Intracomm, tag: int) -> bytes | None:
    """Returns a short message that has arrived; None if there is none."""
    status = MPI.Status()
    if not comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        return None
    message = bytearray(status.Get_count(MPI.BYTE))
    comm.Recv([message, MPI.BYTE], status.Get_source(), tag)
    return bytes(message)


def abort(comm: MPI.Intracomm, code: int) -> None:
    """Ends the job; does not return."""
    comm.Abort(code)


def call(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    """Returns the function that makes MPI's call for a collective; call a blocking one only when all ranks have come."""
    return PRIMITIVES[args.op](comm, args, blocking)


def _all_reduce(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    source, target, kind, operation = args.source, args.target, _TYPES[args.dtype.shown], _operation(args)
    into, same = _spec(target, kind), source.ctypes.data == target.ctypes.data
    operand = MPI.IN_PLACE if same else _spec(source, kind)
    if blocking and same:
        pieces = [_spec(target[at : at + _CHUNK], kind) for at in range(0, target.size, _CHUNK)]

        def reduce_pieces() -> None:
            for piece in pieces:
                comm.Allreduce(operand, piece, operation)

        return reduce_pieces
    reduce = comm.Allreduce if blocking else comm.Iallreduce
    return lambda: reduce(operand, into, operation)


def _reduce_scatter(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    kind, operation = _TYPES[args.dtype.shown], _operation(args)
    into = _spec(args.target, kind)
    scatter = comm.Reduce_scatter_block if blocking else comm.Ireduce_scatter_block
    # mpi4py wants the count of a block on both sides.
    return lambda: scatter((args.source, into[1], kind), into, operation)


def _reduce_to(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    """A Reduce; only the root has a target."""
    source, target, kind = args.source, args.target, _TYPES[args.dtype.shown]
    given, into = _spec(source, kind), _spec(target, kind) if comm.rank == args.root else None
    same = comm.rank == args.root and source.ctypes.data == target.ctypes.data
    reduce, operation = comm.Reduce if blocking else comm.Ireduce, _operation(args)
    return lambda: reduce(MPI.IN_PLACE if same else given, into, operation, args.root)


def _gather(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    """A Gather; only the root has a target."""
    width, unit = _unit(args.source)
    count = args.source.size // width
    taken = (args.target, count, unit) if args.target.size else None
    gather = comm.Gather if blocking else comm.Igather
    return lambda: gather((args.source, count, unit), taken, args.root)


def _all_gather(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    block = args.target[: args.target.size // len(args.ranks)]
    width, unit = _unit(block)
    gather = comm.Allgather if blocking else comm.Iallgather
    return lambda: gather((args.source, args.source.size // width, unit), (args.target, block.size // width, unit))


def _all_to_all(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    block = args.target[: args.target.size // len(args.ranks)]
    width, unit = _unit(block)
    every = block.size // width
    exchange = comm.Alltoall if blocking else comm.Ialltoall
    return lambda: exchange((args.source, every, unit), (args.target, every, unit))


def _broadcast(comm: MPI.Intracomm, args: CollectiveArgs, blocking: bool) -> Callable[[], Request]:
    width, unit = _unit(args.target)
    broadcast = comm.Bcast if blocking else comm.Ibcast
    return lambda: broadcast((args.target, args.target.size // width, unit), args.root)


PRIMITIVES: dict[str, Callable[[MPI.Intracomm, CollectiveArgs, bool], Callable[[], Request]]] = {
    ALL_REDUCE: _all_reduce,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
    REDUCE_TO: _reduce_to,
    GATHER: _gather,
    BROADCAST: _broadcast,
}
"""Maps each collective to the function that makes MPI's call for it."""


def _operation(args: CollectiveArgs) -> MPI.Op:
    return MPI.SUM if args.reduce == SUM else MPI.MAX if args.reduce == MAX else MPI.MIN


def _unit(block: Bytes) -> tuple[int, MPI.Datatype]:
    """Returns the width and the type of the widest MPI integer whose width divides a block's size; RankError if the block is too large."""
    width, unit = next(row for row in _UNITS if block.size % row[0] == 0)
    if block.size // width > _COUNTS:
        raise RankError(
            f"a collective moves blocks of {block.size} bytes; one MPI call can count {_COUNTS} units of {width}"
        )
    return width, unit


def _spec(data: Bytes, kind: MPI.Datatype) -> Spec:
    count = data.size // kind.Get_size()
    if count > _COUNTS:
        raise RankError(f"a collective reduces {count} elements; one MPI call can count {_COUNTS}")
    return data, count, kind


def memory_kinds() -> str:
    """Returns the kinds of memory that MPI declares to accept as operands (`mpi_memory_alloc_kinds`); empty if it declares none."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return ""
    return MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
