"""Hashes a checkpoint in threads while its tensors are read; hashlib lets other threads run meanwhile.

Each byte is hashed once in the job, not once by every rank that reads it: of all tensors, put one behind the other, each rank hashes an
equal run of parts, and opens the files of these only. A checkpoint is whole or it is not used: what nobody reads is hashed, too.

    with Proof(checkpoint, rank, ranks) as proof:
        ...                                  # read the tensors
        problems = proof.problems()          # of this rank's run
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import DamagedError
from ..transport import usable_cores
from .checkpoint import Checkpoint
from .checkpoint_file import PART, STORED

_THREADS = 8
_CHUNK = 1 << 22
"""Bytes that are read and hashed at once: enough that a thread seldom waits for its turn in Python."""
_own = threading.local()


@dataclass(frozen=True)
class _Part:
    """Bytes of a file with the hash that was written; `what` they are."""

    file: Path
    offset: int
    size: int
    sha256: str
    what: str

    def problem(self) -> str:
        """What is wrong with them; empty where they are as written."""
        digest, view, left = hashlib.sha256(), _buffer(self.size), self.size
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset)
                while left and (count := file.readinto(view[:left])):
                    digest.update(view[:count])
                    left -= count
        except OSError as error:
            return f"{self.file}: {self.what}: {error.strerror}"
        if (found := digest.hexdigest()) == self.sha256:
            return ""
        return (
            f"{self.file}: {self.what} was changed: the SHA-256 of bytes {self.offset} to {self.offset + self.size} begins with "
            f"{found[:12]}, that of what was written with {self.sha256[:12]}"
        )


def _buffer(size: int) -> memoryview:
    """Memory of this thread for so many bytes, or a chunk; memory that is used again is not mapped in again."""
    wanted = min(size, _CHUNK)
    held = getattr(_own, "buffer", b"")
    if len(held) < wanted:
        held = _own.buffer = bytearray(wanted)
    return memoryview(held)


class Proof:
    """The hashing of a rank's run, which goes on in threads until it is asked for."""

    def __init__(self, checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> None:
        self._pool = ThreadPoolExecutor(min(len(usable_cores()), _THREADS), thread_name_prefix="sha256")
        self._problems: list[str] = []
        self._found: list[Future[str]] = []
        try:
            self._found = [self._pool.submit(part.problem) for part in _run(checkpoint, rank, ranks)]
        except DamagedError as error:
            self._problems = list(error.problems)

    def problems(self) -> list[str]:
        """What is not as it was written, a line for each tensor's part; waits until all is hashed."""
        return [*self._problems, *(text for future in self._found if (text := future.result()))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the hashing, also where it is not done."""
        self._pool.shutdown(cancel_futures=True)


def _run(checkpoint: Checkpoint, rank: int, ranks: int) -> Iterator[_Part]:
    """The parts that a rank hashes; DamagedError where a file's header is not the one that was written."""
    if checkpoint.index.format == 1:
        for name, record in list(checkpoint.index.files.items())[rank::ranks]:
            if record.sha256:
                yield _Part(checkpoint.folder / name, 0, record.bytes, record.sha256, "it")
        return
    tensors = checkpoint.index.tensors
    pieces = sorted(
        (piece.file, piece.key, STORED[one.dtype].bytes_of(piece.box.shape), name, piece)
        for name, one in tensors.items()
        for piece in one.pieces
    )
    total = sum(size for _, _, size, _, _ in pieces)
    begin, end = total * rank // ranks, total * (rank + 1) // ranks
    at = 0
    for file, _, size, name, piece in pieces:
        if at < end and at + size > begin:
            stored = checkpoint.stored(name, piece)
            part = f" {piece.box}" if piece.box.count < tensors[name].count else ""
            for number, digest in enumerate(stored.sha256):
                first = number * PART
                if begin <= at + first < end:
                    length = min(PART, size - first)
                    yield _Part(checkpoint.folder / file, stored.offset + first, length, digest, f"'{name}'{part}")
        at += size
