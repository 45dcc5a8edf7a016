"""Ranks as threads of one process: mailboxes in place of MPI, for tests, `partc verify` and machines without MPI.

A send copies its bytes into a mailbox and is complete at once; a collective is a rendezvous to which each rank contributes a copy of its
bytes, and which is complete when all have contributed. All waits end when a rank has failed, and when no rank can proceed: then the error
says what each rank waits for, so that a wrong order of communication is a message and not a hang.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Bytes, Dtype

from ..artifact.format import ALL_GATHER, ALL_TO_ALL, BROADCAST
from ..errors import RankError
from ..job.machine import core_limit
from .transport import AGREEMENT, GATHER, Agreements, CollectiveArgs, Request, Transport, Vector, stalled

_Key = tuple[int, int, int]


@dataclass
class _Rendezvous:
    """A round in which every rank contributes an object and gets those of all ranks."""

    contributed: dict[int, object] = field(default_factory=dict)
    complete: bool = False


@dataclass(frozen=True)
class _Receive:
    buffer: Bytes
    key: _Key


@dataclass(frozen=True)
class _Contribution:
    rendezvous: _Rendezvous
    args: CollectiveArgs


class LocalWorld:
    """The ranks of one process; `transport(rank)` is the transport for a rank's thread."""

    def __init__(self, size: int, stall: float = 30.0) -> None:
        self.size = size
        self.stall = stall
        self._changed = Condition()
        self._mail: dict[_Key, deque[Bytes]] = {}
        self._collectives: dict[tuple[tuple[int, ...], int], _Rendezvous] = {}
        self._waiting: dict[int, tuple[Callable[[], bool], Callable[[], str]]] = {}
        self._finished: set[int] = set()
        self._failure: str | None = None
        self._interrupted: dict[int, str] = {}
        self._why = ""
        self._round = _Rendezvous()

    def transport(self, rank: int) -> Transport:
        """Returns a rank's end of the job."""
        return LocalTransport(self, rank)

    def reset(self) -> None:
        """Discards messages and failures; only between steps, when no rank is inside a call."""
        with self._changed:
            self._mail.clear()
            self._collectives.clear()
            self._finished.clear()
            self._failure, self._why = None, ""
            self._interrupted.clear()
            self._round = _Rendezvous()

    def finish(self, rank: int, why: str = "") -> None:
        """Notes that a rank will not communicate until the next reset; `why` is the reason, if the other ranks do not know it."""
        with self._changed:
            self._finished.add(rank)
            self._why = self._why or why
            self._check_progress()

    def fail(self, message: str) -> None:
        """Ends every wait with the message; only the first failure counts."""
        with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    def interrupt(self, rank: int, message: str) -> None:
        """Ends the waits of one rank with the message."""
        with self._changed:
            self._interrupted.setdefault(rank, message)
            self._changed.notify_all()

    def put(self, key: _Key, data: Bytes) -> None:
        """Puts a message into a mailbox."""
        with self._changed:
            self._mail.setdefault(key, deque()).append(data)
            self._changed.notify_all()

    def take(self, key: _Key, what: Callable[[], str]) -> Bytes:
        """Waits for a message in a mailbox, and returns the oldest."""
        with self._changed:
            self._wait(key[1], lambda: bool(self._mail.get(key)), what)
            return self._mail[key].popleft()

    def contribute(self, ranks: tuple[int, ...], tag: int, rank: int, data: object) -> _Rendezvous:
        """Adds a rank's bytes to the rendezvous of a collective, and returns the rendezvous."""
        with self._changed:
            rendezvous = self._collectives.setdefault((ranks, tag), _Rendezvous())
            rendezvous.contributed[rank] = data
            if len(rendezvous.contributed) == len(ranks):
                rendezvous.complete = True
                del self._collectives[ranks, tag]
                self._changed.notify_all()
            return rendezvous

    def collect(self, rank: int, rendezvous: _Rendezvous, what: Callable[[], str]) -> dict[int, object]:
        """Maps each rank to its contribution to a collective; returns when all have contributed."""
        with self._changed:
            self._wait(rank, lambda: rendezvous.complete, what)
            return rendezvous.contributed

    def exchange(self, rank: int, thing: object, what: Callable[[], str]) -> list[object]:
        """Returns the objects that all ranks contribute to this round of all ranks, in the order of the ranks."""
        with self._changed:
            rendezvous = self._round
            rendezvous.contributed[rank] = thing
            if len(rendezvous.contributed) == self.size:
                rendezvous.complete = True
                self._round = _Rendezvous()
                self._changed.notify_all()
            self._wait(rank, lambda: rendezvous.complete, what)
            return [rendezvous.contributed[other] for other in range(self.size)]

    def _wait(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        begun = time.monotonic()
        report = self.stall
        self._waiting[rank] = (ready, what)
        try:
            while not ready():
                self._check_progress()
                if rank in self._interrupted:
                    raise RankError(self._interrupted[rank])
                if self._failure is not None:
                    raise RankError(self._failure)
                if not self._changed.wait(max(begun + report - time.monotonic(), 0.0)) and not ready():
                    print(stalled(rank, time.monotonic() - begun, what()), file=sys.stderr, flush=True)
                    report *= 2
        finally:
            del self._waiting[rank]

    def _check_progress(self) -> None:
        """Fails when every rank waits for a message that no rank will send."""
        blocked = [rank for rank, (ready, _) in self._waiting.items() if not ready()]
        if not blocked or self._failure is not None or len(set(blocked) | self._finished) < self.size:
            return
        lines = [f"  rank {rank} waits in {self._waiting[rank][1]()}" for rank in sorted(blocked)]
        self._failure = self._why or "\n".join(
            ["no rank can go on: what they wait for is never sent", *lines, "  help: compile again"]
        )
        self._changed.notify_all()


class LocalTransport:
    """One rank's end of a LocalWorld."""

    tags = sys.maxsize

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world = world
        self.rank = self.place = rank
        self.size = world.size
        self.stall = world.stall
        self.cores = max(1, core_limit() // world.size)
        self.shares_host = world.size > 1
        self.single_host, self.has_own_core = True, False
        self._agreements = 0

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        self.world.put((self.rank, peer, tag), buffer.copy())
        return None

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Request:
        return _Receive(buffer, (peer, self.rank, tag))

    def wait(self, request: Request, what: Callable[[], str]) -> None:
        if isinstance(request, _Receive):
            data = self.world.take(request.key, what)
            if data.size != request.buffer.size:
                raise RankError(f"rank {self.rank} got {data.size} bytes instead of {request.buffer.size}: {what()}")
            request.buffer[:] = data
        elif isinstance(request, _Contribution):
            given = self.world.collect(self.rank, request.rendezvous, what)
            _distribute(self.rank, request.args, [np.asarray(given[rank]) for rank in request.args.ranks], what)

    def interrupt(self, message: str) -> None:
        self.world.interrupt(self.rank, message)

    def with_progress(self, action: Callable[[], object]) -> Callable[[], object]:
        return action

    def create_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        pass

    def reduces(self, op: str, ranks: Sequence[int], dtype: Dtype, reduce: str) -> bool:
        return False

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        def begin() -> Request:
            data = args.source.copy()
            return _Contribution(self.world.contribute(args.ranks, args.tag, self.rank, data), args)

        return begin

    def all_reduce_max(self, vector: Vector) -> Vector:
        return _highest(self.world.exchange(self.rank, vector.copy(), lambda: AGREEMENT))

    def count_step(self) -> None:
        pass  # if no rank can proceed, all ranks notice it at once

    def agreements(self) -> Agreements:
        self._agreements += 1
        return LocalAgreements(self.world, self.rank, -self._agreements)

    def all_gather_text(self, text: str) -> list[str]:
        return [str(one) for one in self.world.exchange(self.rank, text, lambda: "the exchange of messages")]

    def fail(self, message: str, buffers: object = None) -> None:
        self.world.fail(message)

    def leave(self, message: str) -> None:
        self.world.finish(self.rank, message)

    def abort(self, message: str) -> None:
        self.world.fail(message)

    def close(self) -> None:
        pass


class LocalAgreements:
    """Agreements as collectives with a tag of their own."""

    def __init__(self, world: LocalWorld, rank: int, tag: int) -> None:
        self.world, self.rank, self.tag = world, rank, tag
        self.everyone = tuple(range(world.size))

    def begin(self, vector: Vector) -> Callable[[], Vector]:
        world, rank, own = self.world, self.rank, vector.copy()
        if world.size == 1:
            return lambda: own
        rendezvous = world.contribute(self.everyone, self.tag, rank, own)
        return lambda: _highest(world.collect(rank, rendezvous, lambda: AGREEMENT).values())


def _highest(vectors: Iterable[object]) -> Vector:
    highest: Vector = np.stack([np.asarray(one, np.int64) for one in vectors]).max(axis=0)
    return highest


def _distribute(rank: int, args: CollectiveArgs, given: Sequence[Bytes], what: Callable[[], str]) -> None:
    """Writes a rank's part of the contributions `given` of all ranks to its target."""
    parts = PRIMITIVES[args.op](given, args.ranks.index(rank), args)
    if parts is None:
        return
    target = args.target
    if any(part.size * len(parts) != target.size for part in parts):
        sizes = ", ".join(str(part.size) for part in parts)
        raise RankError(f"rank {rank} got {sizes} bytes instead of {target.size} from all: {what()}")
    if target.size:
        np.concatenate(parts, out=target)


Primitive: TypeAlias = Callable[[Sequence[Bytes], int, CollectiveArgs], Sequence[Bytes] | None]
"""Returns the bytes that a rank receives, None for nothing; the arguments are all ranks' bytes, in the list's order, and its index."""


def _own_blocks(given: Sequence[Bytes], place: int, args: CollectiveArgs) -> Sequence[Bytes]:
    size = args.target.size // len(given)
    return [data[place * size : (place + 1) * size] for data in given]


PRIMITIVES: dict[str, Primitive] = {
    ALL_GATHER: lambda given, place, args: given,
    GATHER: lambda given, place, args: given if place == args.root else None,
    ALL_TO_ALL: _own_blocks,
    BROADCAST: lambda given, place, args: [given[args.root]] if place != args.root else None,
}
"""The collectives of this transport; values to reduce are gathered, and reduced by the runtime."""
