"""Limits the memory for data: all data that is not mapped is counted before it is allocated.

A mapped file takes no memory. A compressed file states its size, truly or not; a decompression bomb either states little and expands to
much, or states much.
"""

from __future__ import annotations

import os

from ..files.regular import text_of_system

MAPPED = "save it uncompressed (np.save, np.savez): then it takes none"
_SHARE = 2
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_ELSEWHERE = 1 << 34


class Memory:
    """A budget in bytes for data that is not mapped; by default half of the memory of the machine or the container."""

    def __init__(self, most: int | None = None) -> None:
        self.most = default_bytes() if most is None else most
        self.reserved = 0

    def take(self, count: int, what: str, instead: str = MAPPED) -> None:
        """Counts `count` bytes before they are allocated; ValueError beyond the limit, with `instead` as the alternative for the user."""
        if self.reserved + count > self.most:
            before = f", with {self.reserved:,} of other data," if self.reserved else ""
            raise ValueError(
                f"{what} takes {count:,} bytes of memory{before} and {self.most:,} are allowed\n"
                f"  help: give --max-bytes more, or {instead}"
            )
        self.reserved += count


def default_bytes() -> int:
    """Returns half of the memory in bytes of the machine, or of the container in which this process runs."""
    found = [int(text) for text in map(str.strip, map(text_of_system, _LIMITS)) if text.isdecimal()]
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        found.append(_ELSEWHERE)
    return min(found) // _SHARE
