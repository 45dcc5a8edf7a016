"""The protocol that the runtime needs of a transport: MPI, threads, or anything else.

Laws: messages of one (source, target, tag) arrive in the order in which they were sent; a buffer passed to `isend` or `irecv` belongs to
the transport until `wait` returns; a wait never lasts for ever, because the failure of any rank ends it with a RankError.

A collective begins and is waited for like a message. All ranks of a list call the collectives of that list in the same order. Each rank
passes packed bytes (`source`) and receives packed bytes (`target`). With p ranks and n elements in a block:

    AllReduce       source n    target n     reduced element by element (source may be target)
    ReduceScatter   source p*n  target n     the rank's own block of the reduced source
    AllGather       source n    target p*n   all sources, in the list's order
    AllToAll        source p*n  target p*n   block i of the target is the rank's own block of the i-th rank's source
    Reduce          source n    target n     on the root: the sources reduced element by element; elsewhere nothing
    Gather          source n    target p*n   on the root: all sources, in the list's order; elsewhere nothing
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
"""The op that replaces a Reduce whose type the transport does not reduce; rank files have no such op."""
AGREEMENT = "the agreement on the sizes of a step"
"""The name, in reports, of a wait for the vectors of other ranks."""
Vector: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CollectiveArgs:
    """The arguments of a collective, as transports get them: among `ranks`, which include this one, from `source` to `target`.

    `at_once`: every one of the ranks waits directly after it begins, so that a transport may do both in one call.
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
    """Element-wise maxima over all ranks.

    The n-th agreement that one rank begins is the n-th of every other rank, whatever each does between two of them.
    """

    def begin(self, vector: Vector) -> Callable[[], Vector]:
        """Contributes this rank's vector without waiting; the returned function waits for all ranks' vectors and returns their maximum."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One rank's end of the job."""

    rank: int
    size: int
    place: int
    """The index of this rank among the ranks of its machine."""
    cores: int
    """Cores that this rank may keep busy without taking them from its neighbours."""
    shares_host: bool
    """Whether several ranks share a machine, so that a waiting rank must not spin for long."""
    tags: int
    """The largest tag."""
    stall: float
    """Seconds after which a wait is reported, and again after twice as long."""
    single_host: bool
    """Whether all ranks are on one machine."""
    has_own_core: bool
    """Whether every rank has a core of its own, so that a waiting rank may keep its core busy."""

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
        """Called from another thread: ends this rank's current wait, and later ones, with a RankError with this message."""
        ...

    def with_progress(self, action: Callable[[], object]) -> Callable[[], object]:
        """Returns a function that runs `action`, which computes, while messages under way make progress."""
        ...

    def create_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make ready for collectives among each of these lists of ranks; all ranks call it, with the same lists."""
        ...

    def reduces(self, op: str, ranks: Sequence[int], dtype: Dtype, reduce: str) -> bool:
        """Whether an AllReduce, a ReduceScatter or a Reduce among these ranks accepts this type, and gives every rank the same bits.

        Where it does not, the values themselves are moved, and the runtime reduces them.
        """
        ...

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        """Returns the function that begins the collective; it may be called many times."""
        ...

    def all_reduce_max(self, vector: Vector) -> Vector:
        """The element-wise maximum over all ranks."""
        ...

    def count_step(self) -> None:
        """Counts a step in which all ranks take part, without a message: if another rank left before that step, this rank's wait fails."""
        ...

    def agreements(self) -> Agreements:
        """Agreements of all ranks, in an order of their own that is independent of the ranks' other communication. Collective."""
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
        """Tells every other rank that this one takes part in no further communication; a rank that waits for it later gets a RankError."""
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
