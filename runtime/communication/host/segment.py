"""Memory that the ranks of one host share, one segment a job, without a name in any folder: nothing is left of it however they end.

Every rank makes an anonymous file (memfd) before the ranks have met, and tells the others where the system lists it
(`/proc/PID/fd/N`); the file of the first rank of the host is taken. It begins with a random token, by which the others know that they have
opened the right one: ranks in containers may see other processes under the same numbers. The file is sparse: a part of it takes memory
once it is written to. Parts are handed out in one order on all ranks, so that no rank tells another where they lie.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets

_SIZE = 1 << 42
"""Bytes of the sparse file, most of which are never touched."""
_TOKEN = 16
_PAGE = mmap.PAGESIZE


class Segment:
    """A rank's own file at first; `adopt` makes it another rank's."""

    def __init__(self) -> None:
        token = secrets.token_bytes(_TOKEN)
        self._file = os.memfd_create("partc")
        os.truncate(self._file, _SIZE)
        os.write(self._file, token)
        self.address = [f"/proc/{os.getpid()}/fd/{self._file}", token.hex()]
        """The address by which another rank adopts it."""
        self._next = _PAGE

    def adopt(self, path: str, token: str) -> None:
        """Takes another rank's memory in place of its own; OSError where it cannot be opened, or is not the right one."""
        with open(path, "r+b", buffering=0) as file:
            if file.read(_TOKEN) != bytes.fromhex(token):
                raise OSError(f"{path} is not the memory of this job")
            handle = os.dup(file.fileno())
        os.close(self._file)
        self._file = handle

    def reserve(self, size: int) -> int:
        """The offset of the next part of so many bytes; all ranks reserve the same in one order."""
        offset = self._next
        self._next = offset + -(-size // _PAGE) * _PAGE
        return offset

    def map(self, offset: int, size: int) -> memoryview:
        """A part of the memory, which was cleared at the beginning."""
        return memoryview(mmap.mmap(self._file, -(-size // _PAGE) * _PAGE, offset=offset))[:size]

    def close(self) -> None:
        """Gives the file back; parts that are mapped stay as long as they are used."""
        os.close(self._file)


def address_of(memory: memoryview) -> int:
    """Where mapped memory begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
