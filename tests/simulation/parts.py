"""What is under way between simulated ranks: both ends of a message, a rank's part in a collective, and where the parts meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, REDUCE_TO
from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.communication.transport import GATHER, CollectiveArgs

Key = tuple[int, int, int]


class Transfer:
    """One end of a message."""

    __slots__ = ("buffer", "data", "done", "key", "sends")

    def __init__(self, key: Key, buffer: Bytes, sends: bool) -> None:
        self.key, self.buffer, self.sends, self.done = key, buffer, sends, False
        self.data: Bytes | None = buffer.copy() if sends else None

    def ready(self) -> bool:
        """Whether it is complete."""
        return self.done


class Joining:
    """A rank's part in a collective: `given` is what it brings, `found` what it gets."""

    __slots__ = ("args", "arrived", "done", "given", "in_place", "meeting", "rank")

    def __init__(self, rank: int, args: CollectiveArgs) -> None:
        self.rank, self.args = rank, args
        self.done = self.arrived = False
        self.given = args.source.copy()
        self.in_place = bool(args.target.size) and np.may_share_memory(args.source, args.target)
        self.meeting: Meeting | None = None

    def ready(self) -> bool:
        """Whether it is complete on this rank."""
        return self.done


@dataclass
class Meeting:
    """One collective: what must be alike on all ranks, and what each brings."""

    signature: tuple[Any, ...]
    brought: dict[int, Any] = field(default_factory=dict)
    joinings: list[Joining] = field(default_factory=list)
    complete: bool = False

    def ready(self) -> bool:
        """Whether all have come."""
        return self.complete


def result(args: CollectiveArgs, rank: int, brought: Sequence[Bytes]) -> Bytes:
    """What a rank gets of what all have brought: the definitions of `transport.py`, in the order of the list."""
    place, count = args.ranks.index(rank), len(args.ranks)
    if args.op in (ALL_GATHER, GATHER):
        return np.concatenate(brought)
    if args.op == ALL_TO_ALL:
        return np.concatenate([one.reshape(count, -1)[place] for one in brought])
    if args.op == BROADCAST:
        return brought[args.root]
    assert args.op in (ALL_REDUCE, REDUCE_SCATTER, REDUCE_TO), args.op
    ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[args.reduce]
    total = brought[0].view(args.dtype.numpy).copy()
    for one in brought[1:]:
        ufunc(total, one.view(args.dtype.numpy), out=total)
    found = total.view(np.uint8)
    return found.reshape(count, -1)[place] if args.op == REDUCE_SCATTER else found


def named(request: Transfer | Joining) -> str:
    if isinstance(request, Joining):
        return f"{request.args.op} of tag {request.args.tag}"
    source, target, tag = request.key
    return f"a message of {request.buffer.size} bytes from rank {source} to rank {target}, tag {tag}"
