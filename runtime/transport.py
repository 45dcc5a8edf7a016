"""What moves bytes between ranks: the protocol that the runtime needs of MPI, of threads, or of anything else.

Laws: messages of one (source, target, tag) arrive in the order in which they were sent; a buffer given to `isend` or `irecv`
belongs to the transport until `wait` returns; a wait never lasts for ever, because the failure of any rank ends it with a
RankError.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from .dtypes import Bytes

Request: TypeAlias = object
Vector: TypeAlias = npt.NDArray[np.int64]


@runtime_checkable
class Transport(Protocol):
    """One rank's end of the job."""

    rank: int
    size: int
    cores: int
    """Cores that this rank may keep busy without taking them from its neighbours."""
    crowded: bool
    """Whether ranks share a machine, so that none may spin for long."""
    tags: int
    """The largest tag."""
    stall: float
    """Seconds after which a wait is reported, and again after twice as long."""

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        """Begin to send the buffer."""
        ...

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Request:
        """Begin to receive exactly as many bytes as the buffer has."""
        ...

    def wait(self, request: Request, what: Callable[[], str]) -> None:
        """Return when the transfer is complete; `what` names it in reports."""
        ...

    def agree(self, vector: Vector) -> Vector:
        """The element-wise maximum over all ranks."""
        ...

    def share(self, text: str) -> list[str]:
        """The text of every rank, in order of ranks."""
        ...

    def fail(self, message: str, buffers: object = None) -> None:
        """Tell every other rank that this one has failed: their waits raise a RankError with the message.

        `buffers` hold the memory that messages under way may still touch.
        """
        ...

    def abort(self, message: str) -> None:
        """End the whole job with a message; over MPI this does not return."""
        ...

    def close(self) -> None:
        """Give back what the transport holds; nobody uses it afterwards."""
        ...


def stalled(rank: int, seconds: float, what: str) -> str:
    """The line that reports a long wait."""
    return f"partc: rank {rank} has waited {seconds:.0f} s: {what}"


def usable_cores() -> frozenset[int]:
    """The cores that the system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
