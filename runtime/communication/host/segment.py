"""Memory that the ranks of one host share: one segment for a job, without a name in any folder, so nothing remains however they end.

Every rank creates an anonymous file (memfd) before the ranks have met, and sends the others its path in the system (`/proc/PID/fd/N`); all
use the file of the first rank of the host. It begins with a random token, by which the others check that they have opened the right one:
ranks in containers may see other processes under the same numbers. The file is sparse: a part of it takes memory once it is written to. All
ranks reserve parts in the same order, so that no rank needs to send another their offsets.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets

_SIZE = 1 << 42
"""The bytes of the sparse file, most of which are never used."""
_TOKEN = 16
_PAGE = mmap.PAGESIZE


class Segment:
    """The shared memory of a job: at first a rank's own file; `adopt` replaces it with another rank's."""

    def __init__(self) -> None:
        token = secrets.token_bytes(_TOKEN)
        self._file = os.memfd_create("partc")
        os.truncate(self._file, _SIZE)
        os.write(self._file, token)
        self.address = [f"/proc/{os.getpid()}/fd/{self._file}", token.hex()]
        """The arguments with which another rank adopts it."""
        self._next = _PAGE

    def adopt(self, path: str, token: str) -> None:
        """Replaces this rank's file with another rank's; OSError where it cannot be opened, or is not the right one."""
        with open(path, "r+b", buffering=0) as file:
            if file.read(_TOKEN) != bytes.fromhex(token):
                raise OSError(f"{path} is not the memory of this job")
            handle = os.dup(file.fileno())
        os.close(self._file)
        self._file = handle

    def reserve(self, size: int) -> int:
        """Returns the offset of the next `size` bytes; all ranks must reserve the same sizes in the same order."""
        offset = self._next
        self._next = offset + -(-size // _PAGE) * _PAGE
        return offset

    def map(self, offset: int, size: int) -> memoryview:
        """Returns a part of the memory, which is initially zero."""
        return memoryview(mmap.mmap(self._file, -(-size // _PAGE) * _PAGE, offset=offset))[:size]

    def close(self) -> None:
        """Closes the file; mapped parts stay as long as they are used."""
        os.close(self._file)


def address_of(memory: memoryview) -> int:
    """Returns the address of mapped memory in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
