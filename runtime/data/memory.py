"""The memory that data may take: everything that is not mapped is counted before it is allocated.

A file that is mapped takes none. What is compressed says how large it will be, truly or not; a bomb says little and has much, or says much.
"""

from __future__ import annotations

import os

from ..files.regular import text_of_system

MAPPED = "save it uncompressed (np.save, np.savez): then it takes none"
_SHARE = 2
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_ELSEWHERE = 1 << 34


class Memory:
    """So many bytes for data that is not mapped; by default half of what the machine, or the container, has."""

    def __init__(self, most: int | None = None) -> None:
        self.most = default_bytes() if most is None else most
        self.reserved = 0

    def take(self, count: int, what: str, instead: str = MAPPED) -> None:
        """Counts the bytes of something that is about to be allocated; ValueError where they are too many, with what to do instead."""
        if self.reserved + count > self.most:
            before = f", with {self.reserved:,} of other data," if self.reserved else ""
            raise ValueError(
                f"{what} takes {count:,} bytes of memory{before} and {self.most:,} are allowed\n"
                f"  help: give --max-bytes more, or {instead}"
            )
        self.reserved += count


def default_bytes() -> int:
    """Half of the memory of the machine, or of the container that this process is in."""
    found = [int(text) for text in map(str.strip, map(text_of_system, _LIMITS)) if text.isdecimal()]
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        found.append(_ELSEWHERE)
    return min(found) // _SHARE
