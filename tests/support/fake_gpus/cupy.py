"""A stand-in for cupy in tests without a GPU: streams, events and NCCL over files, of memory of the host.

As with NCCL, work is queued on a stream and done in its order, messages of a communicator have no tags, and a size that the other end does
not expect is an error (there it is undefined). It does not prove that a GPU does the same. Communicators have their files in the folder
that `FAKE_GPUS` names.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from waiting import until

streams: dict[int, Stream] = {}


class Device:
    """A GPU."""

    def __init__(self, number: int) -> None:
        self.number = number

    def use(self) -> None:
        """Makes it the thread's current one."""


class Stream:
    """Work in order: each piece is tried until it returns True."""

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "another stream waits for work of the default one"
        self.work: list[Callable[[], bool]] = []
        self.queued = self.finished = 0
        self.ptr = len(streams) + 1
        streams[self.ptr] = self

    def put(self, piece: Callable[[], bool]) -> None:
        """Queues a piece of work."""
        self.work.append(piece)
        self.queued += 1

    def advance(self) -> None:
        """Does what can be done."""
        while self.work and self.work[0]():
            self.work.pop(0)
            self.finished += 1


class Event:
    """A point in a stream."""

    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing

    def record(self, stream: Stream) -> None:
        """Places it after all queued work."""
        self.stream, self.place = stream, stream.queued

    @property
    def done(self) -> bool:
        """Whether the work before it is done."""
        for stream in streams.values():
            stream.advance()
        return self.stream.finished >= self.place


UINT8, INT32, UINT32, INT64, UINT64, FLOAT, DOUBLE = range(1, 8)
SUM = 0
_TYPES = {UINT8: np.uint8, INT32: np.int32, INT64: np.int64, FLOAT: np.float32, DOUBLE: np.float64}
calls: Counter[str] = Counter()
"""How often this process has made each call."""


class NcclCommunicator:
    """One rank's end; it is created when all ranks have come."""

    def __init__(self, size: int, identifier: tuple[int, ...], rank: int) -> None:
        assert len(identifier) == 128
        self.size, self.rank, self.counts = size, rank, Counter[str]()
        self.folder = Path(os.environ["FAKE_GPUS"]) / bytes(identifier[:16]).hex()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(f"here {rank}", b"")
        until(lambda: len([*self.folder.glob("here *")]) == size)

    def _write(self, file: str, data: bytes) -> None:
        (self.folder / f"new {file}").write_bytes(data)
        (self.folder / f"new {file}").rename(self.folder / file)

    def _numbered(self, op: str) -> str:
        calls[op] += 1
        self.counts[op] += 1
        return f"{op} {self.counts[op]}"

    def send(self, source: int, count: int, type: int, peer: int, stream: int) -> None:
        assert (type, peer) == (UINT8, 1 - self.rank)
        file = self._numbered("message")

        def put() -> bool:
            self._write(file, ctypes.string_at(source, count))
            return True

        streams[stream].put(put)

    def recv(self, target: int, count: int, type: int, peer: int, stream: int) -> None:
        assert (type, peer) == (UINT8, 1 - self.rank)
        path = self.folder / self._numbered("message")

        def get() -> bool:
            came = path.exists()
            if came:
                _put(path.read_bytes(), target, count)
            return came

        streams[stream].put(get)

    def _joined(self, op: str, source: int, size: int, stream: int, finish: Callable[[list[bytes]], None]) -> None:
        number, sent = self._numbered(op), False
        paths = [self.folder / f"{number} of {rank}" for rank in range(self.size)]

        def work() -> bool:
            nonlocal sent
            if not sent:
                self._write(paths[self.rank].name, ctypes.string_at(source, size))
                sent = True
            if not all(path.exists() for path in paths):
                return False
            finish([path.read_bytes() for path in paths])
            return True

        streams[stream].put(work)

    def allGather(self, source: int, target: int, count: int, type: int, stream: int) -> None:
        assert type == UINT8
        self._joined("AllGather", source, count, stream, lambda all: _put(b"".join(all), target, count * self.size))

    def allReduce(self, source: int, target: int, count: int, type: int, op: int, stream: int) -> None:
        assert op == SUM
        size = count * np.dtype(_TYPES[type]).itemsize
        self._joined("AllReduce", source, size, stream, lambda all: _put(_sum(all, type), target, size))

    def reduceScatter(self, source: int, target: int, count: int, type: int, op: int, stream: int) -> None:
        assert op == SUM
        size = count * np.dtype(_TYPES[type]).itemsize
        own = slice(self.rank * size, (self.rank + 1) * size)
        self._joined(
            "ReduceScatter", source, size * self.size, stream, lambda all: _put(_sum(all, type)[own], target, size)
        )

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        calls["abort"] += 1

    def destroy(self) -> None:
        calls["destroy"] += 1


def _put(data: bytes, target: int, size: int) -> None:
    assert len(data) == size, (len(data), size)
    ctypes.memmove(target, data, size)


def _sum(contributions: list[bytes], type: int) -> bytes:
    rows = [np.frombuffer(one, _TYPES[type]) for one in contributions]
    total: np.ndarray = np.sum(rows, axis=0, dtype=_TYPES[type])
    return total.tobytes()


def _module(module: str, **members: object) -> types.ModuleType:
    created = types.ModuleType(module)
    created.__dict__.update(members)
    sys.modules[module] = created
    return created


nccl = _module(
    "cupy.cuda.nccl",
    available=True,
    calls=calls,
    get_unique_id=lambda: [*uuid.uuid4().bytes] * 8,
    groupStart=lambda: None,
    groupEnd=lambda: None,
    NcclCommunicator=NcclCommunicator,
    NCCL_SUM=SUM,
    **{f"NCCL_{dtype.__name__.upper()}": code for code, dtype in _TYPES.items()},
    NCCL_FLOAT=FLOAT,
    NCCL_DOUBLE=DOUBLE,
)
cuda = _module("cupy.cuda", Device=Device, Stream=Stream, Event=Event, nccl=nccl)
