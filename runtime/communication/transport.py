"""The protocol that the runtime needs of a transport: MPI, threads, or anything else.

Laws: messages of one (source, target, tag) arrive in the order in which they were sent; a buffer given to `isend` or `irecv`
belongs to the transport until `wait` returns; a wait never lasts for ever, because the failure of any rank ends it with a
RankError.

A collective begins and is waited for like a message. Each rank of a list calls the list's collectives in one order; each gives
packed bytes and gets packed bytes:

    AllReduce       source n    target n     reduced element by element (source may be target)
    ReduceScatter   source p*n  target n     the own block of the reduced source
    AllGather       source n    target p*n   all sources, in the list's order
    AllToAll        source p*n  target p*n   block i of the target is the own block of the i-th rank's source
    Reduce          source n    target n     the sources reduced element by element, on the root; nothing elsewhere
    Gather          source n    target p*n   all sources, in the list's order, on the root; nothing elsewhere
    Broadcast       target n                 the target of the root
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Bytes, Dtype

from ..errors import one_line

Request: TypeAlias = object
GATHER = "Gather"
"""What a Reduce is where the transport does not reduce the type; no op of a rank file."""
AGREEMENT = "the agreement on the sizes of a step"
"""What a wait for other ranks' vectors is called in reports."""
Vector: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CollectiveArgs:
    """A collective as transports see it: among `ranks`, which include this one, from `source` to `target`.

    `at_once`: on every one of the ranks the wait follows the begin at once, and may be one with it.
    """

    op: str
    ranks: tuple[int, ...]
    tag: int
    source: Bytes
    target: Bytes
    dtype: Dtype
    reduce: str = ""
    root: int = 0
    at_once: bool = False


class Agreements(Protocol):
    """Element-wise maxima over all ranks: the n-th that one rank begins is the n-th of every other, whatever lies between them."""

    def begin(self, vector: Vector) -> Callable[[], Vector]:
        """Gives this rank's vector, without waiting; what comes back waits for those of all ranks, and returns the maximum."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of the job."""

    rank: int
    size: int
    place: int
    """The place of this rank among those of its machine."""
    cores: int
    """Cores that this rank may keep busy without taking them from its neighbours."""
    shares_host: bool
    """Whether ranks share a machine, so that none may spin for long."""
    tags: int
    """The largest tag."""
    stall: float
    """Seconds after which a wait is reported, and again after twice as long."""
    single_host: bool
    """Whether all ranks are on one machine."""
    has_own_core: bool
    """Whether every rank has a core of its own, so that a wait may keep it."""

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        """Begin to send the buffer."""
        ...

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Request:
        """Begin to receive exactly as many bytes as the buffer has."""
        ...

    def wait(self, request: Request, what: Callable[[], str]) -> None:
        """Return when the transfer is complete; `what` names it in reports."""
        ...

    def interrupt(self, message: str) -> None:
        """From another thread: what this rank waits for, now or later, ends with a RankError with the message."""
        ...

    def with_progress(self, action: Callable[[], object]) -> Callable[[], object]:
        """The action, which computes, such that messages under way go on meanwhile."""
        ...

    def create_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make ready for collectives among each of these lists of ranks; all ranks call it, with the same lists."""
        ...

    def reduces(self, op: str, ranks: Sequence[int], dtype: Dtype, reduce: str) -> bool:
        """Whether an AllReduce, a ReduceScatter or a Reduce among these ranks takes this type, and gives every rank the same bits.

        Where not, the values themselves are moved, and the runtime reduces them.
        """
        ...

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        """What begins the collective, each time that it is called."""
        ...

    def all_reduce_max(self, vector: Vector) -> Vector:
        """The element-wise maximum over all ranks."""
        ...

    def count_step(self) -> None:
        """Counts this rank to the next step of all ranks, without a message; a rank that waits there is told of one that has left."""
        ...

    def agreements(self) -> Agreements:
        """Agreements of all ranks in an order of their own, beside all else that ranks do together; collective."""
        ...

    def all_gather_text(self, text: str) -> list[str]:
        """The text of every rank, in order of ranks."""
        ...

    def fail(self, message: str, buffers: object = None) -> None:
        """Tell every other rank that this one has failed: their waits raise a RankError with the message.

        `buffers` hold the memory that messages under way may still touch.
        """
        ...

    def leave(self, message: str) -> None:
        """Tell every other rank that this one takes part in nothing more; a rank that waits for it later gets a RankError."""
        ...

    def abort(self, message: str) -> None:
        """End the whole job with a message; over MPI this does not return."""
        ...

    def close(self) -> None:
        """Release communicators and memory; the transport is not used afterwards."""
        ...


def stalled(rank: int, seconds: float, what: str) -> str:
    """The line that reports a long wait."""
    return f"partc: rank {rank} has waited {seconds:.0f} s: {one_line(what)}"
