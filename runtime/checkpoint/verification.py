"""Verifies the checksums of a checkpoint in threads, while programs are loaded or its tensors are read.

Each byte is read once in the job, not once by every rank that needs it: the parts of all tensors, in the order of files and keys, are
divided into equal contiguous ranges, one for each rank, which opens only the files of its range. Parts that no rank loads are verified,
too: a checkpoint is used only if all of it is intact.

A job that reads a checkpoint compares CRC-32s. These detect every flipped bit, and all but one in four billion of other damages, at 5 GB/s
on a core; SHA-256 takes three times as long, and far longer where the processor has no instructions for it. `partc checkpoint verify`
compares SHA-256s. Neither protects against someone who also writes another index.

    with Verification(checkpoint, rank, ranks) as proof:
        ...                             # read the tensors
        problems = proof.problems()     # of this rank's range
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from partc.runtime.artifact.tensors.safetensors_stream import PART, STORED

from ..errors import DamagedError, reason_of
from ..files.regular import open_regular
from ..job.machine import usable_cores
from .shard_files import ShardFiles

_THREADS = 8
_CHUNK = 1 << 22
"""Bytes that are read and summed at a time: enough that a thread rarely waits for Python's lock."""
_own = threading.local()
_CRC_DIGITS = 8


@dataclass(frozen=True)
class _Extent:
    """A range of bytes in a file with the checksum in the file's header, a CRC-32 or a SHA-256. `what` names the tensor for messages."""

    file: Path
    offset: int
    size: int
    written: str
    what: str

    def problem(self) -> str:
        """Returns how the bytes differ from those that were written; empty where they do not."""
        short = len(self.written) == _CRC_DIGITS
        digest, crc, view, left = hashlib.sha256(), 0, _buffer(self.size), self.size
        try:
            with open_regular(self.file) as file:
                file.seek(self.offset)
                while left and (count := file.readinto(view[:left])):
                    if short:
                        crc = zlib.crc32(view[:count], crc)
                    else:
                        digest.update(view[:count])
                    left -= count
        except OSError as error:
            return f"{self.file}: {self.what}: {reason_of(error)}"
        found = f"{crc:08x}" if short else digest.hexdigest()
        if found == self.written and not left:
            return ""
        return (
            f"{self.file}: {self.what} was changed: the {'CRC-32' if short else 'SHA-256'} of bytes {self.offset} to "
            f"{self.offset + self.size} is {found[:12]}, that of what was written {self.written[:12]}"
        )


def _buffer(size: int) -> memoryview:
    """Returns a buffer of this thread of `size` bytes, at most a chunk; it is reused, since new memory would have to be mapped again."""
    wanted = min(size, _CHUNK)
    held = getattr(_own, "buffer", b"")
    if len(held) < wanted:
        held = _own.buffer = bytearray(wanted)
    return memoryview(held)


class Verification:
    """Verifies a rank's range of a checkpoint in background threads; `thorough`: by SHA-256 instead of CRC-32."""

    def __init__(self, checkpoint: ShardFiles, rank: int = 0, ranks: int = 1, thorough: bool = False) -> None:
        self._pool = ThreadPoolExecutor(min(len(usable_cores()), _THREADS), thread_name_prefix="sums")
        self._problems: list[str] = []
        self._found: list[Future[str]] = []
        try:
            self._found = [self._pool.submit(part.problem) for part in _run(checkpoint, rank, ranks, thorough)]
        except DamagedError as error:
            self._problems = list(error.problems)

    def problems(self) -> list[str]:
        """Waits for the threads and returns a line for each part of a tensor that differs from what was written."""
        return [*self._problems, *(text for future in self._found if (text := future.result()))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads, even before they have finished."""
        self._pool.shutdown(cancel_futures=True)


def _run(checkpoint: ShardFiles, rank: int, ranks: int, thorough: bool) -> Iterator[_Extent]:
    """Yields the parts that a rank verifies; DamagedError where a file's header is not the one that was written."""
    tensors = checkpoint.index.tensors
    pieces = sorted(
        (piece.file, piece.key, STORED[one.dtype].bytes_of(piece.region.shape), name, piece)
        for name, one in tensors.items()
        for piece in one.pieces
    )
    total = sum(size for _, _, size, _, _ in pieces)
    begin, end = total * rank // ranks, total * (rank + 1) // ranks
    at = 0
    for file, _, size, name, piece in pieces:
        if at < end and at + size > begin:
            stored = checkpoint.stored(name, piece)
            part = f" {piece.region}" if piece.region.count < tensors[name].count else ""
            for number, sums in enumerate(stored.sums):
                first = number * PART
                if begin <= at + first < end:
                    length = min(PART, size - first)
                    written = sums.sha256 if thorough else sums.crc32
                    yield _Extent(checkpoint.folder / file, stored.offset + first, length, written, f"'{name}'{part}")
        at += size
