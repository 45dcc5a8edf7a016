"""Memory that the ranks of one machine share, without a name in any folder: nothing is left of it however they end.

Rank 0 makes an anonymous file, which the others open through the system's list of its open files; where that cannot be done they open
a temporary file, which has a name until all have it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from ..files.removal import identity, remove_file
from .transport import Request

Wait: TypeAlias = Callable[[Request, Callable[[], str]], None]

_PATH = 1024
_TOKEN = struct.Struct("<q")


def shared(comm: MPI.Intracomm, size: int, wait: Wait) -> mmap.mmap | None:
    """Memory, cleared, that all ranks of the communicator share; None where one of them cannot open it. Collective.

    It begins with a negative number until all have it, which is how a rank knows that it is the right one.
    """
    memory: mmap.mmap | None = None
    handle, path, token = -1, "", secrets.randbits(62) - (1 << 62)
    with contextlib.suppress(OSError):
        if comm.rank == 0:
            handle, path = _made()
            os.truncate(handle, size)
            memory = mmap.mmap(handle, size)
            _TOKEN.pack_into(memory, 0, token)
    path, token = _told(comm, path, token, wait)
    if comm.rank != 0 and path:
        memory = _opened(path, size, token)
    flags = np.array([memory is None], np.int64)
    missing = np.empty_like(flags)
    wait(comm.Iallreduce(flags, missing, MPI.MAX), lambda: "memory that ranks share")
    if handle >= 0:
        if not path.startswith("/proc/"):
            remove_file(Path(path), identity(handle))
        os.close(handle)
    if memory is not None and comm.rank == 0:
        _TOKEN.pack_into(memory, 0, 0)
    return None if missing[0] else memory


def _made() -> tuple[int, str]:
    """A file, open, and how others open it."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("partc")
        return handle, f"/proc/{os.getpid()}/fd/{handle}"
    return tempfile.mkstemp(prefix="partc-")


def _opened(path: str, size: int, token: int) -> mmap.mmap | None:
    """The memory behind a path; None where it cannot be opened, or has another token."""
    with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
        if _TOKEN.unpack_from(memory)[0] == token:
            return memory
    return None


def _told(comm: MPI.Intracomm, path: str, token: int, wait: Wait) -> tuple[str, int]:
    """What rank 0 says, on all ranks."""
    row = np.zeros(_TOKEN.size + _PATH, np.uint8)
    text = os.fsencode(path)
    if comm.rank == 0 and len(text) <= _PATH:
        row[: _TOKEN.size + len(text)] = np.frombuffer(_TOKEN.pack(token) + text, np.uint8)
    wait(comm.Ibcast([row, MPI.BYTE], 0), lambda: "memory that ranks share")
    content = row.tobytes()
    return os.fsdecode(content[_TOKEN.size :].rstrip(b"\0")), _TOKEN.unpack_from(content)[0]
