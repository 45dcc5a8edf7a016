"""Moves memory into huge pages: a core reads memory that each step reads completely, such as a decoder's weights, faster in 2 MB pages.

onnxruntime packs weights into new memory, which the system provides in pages of 4 KB by default: 13,000 of them for 54 MB. In each step
each of them must be looked up, and the core's prefetching ends at each. Where the system gives huge pages only to processes that ask for
them (`madvise`, the usual setting), Linux makes them from existing pages, from version 6.1 on (`MADV_COLLAPSE`).

That copies all weights, which takes as long as the rest of a load in four bits, and pays off after some hundred tokens. So it is spread
over many steps, a few pages in each.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import numpy as np

from ...files.regular import text_of_system

HUGE = 2 << 20
"""Bytes of a huge page where pages have 4 KB."""
STEPS = 256
"""The number of steps after which all memory is in huge pages."""
_COLLAPSE = 25
_LEAST = 0.9
"""The share of a huge page that must be in use before it is made: between weights in malloc's heap a few pages have been freed."""


def huge_pages() -> Iterator[int]:
    """Makes huge pages of this process's memory where at least 0.9 of a huge page is in use; yields in `STEPS` parts how many it made.

    Yields nothing where the system makes none; memory that is mapped from files stays as it is.
    """
    if sys.platform != "linux" or mmap.PAGESIZE != 4096:
        return
    library = ctypes.CDLL(None)
    incore, advise = library.mincore, library.madvise
    incore.argtypes, advise.argtypes = (
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    )
    places = list[int]()
    for line in text_of_system("/proc/self/maps").splitlines():
        fields = line.split()
        if len(fields) < 5 or fields[1] != "rw-p" or fields[4] != "0" or fields[5:] not in ([], ["[heap]"]):
            continue
        first, end = (int(place, 16) for place in fields[0].split("-"))
        first = -(-first // HUGE) * HUGE
        count = (end - first) // HUGE
        if count <= 0:
            continue
        there = np.zeros((count, HUGE // mmap.PAGESIZE), np.uint8)
        if incore(first, count * HUGE, there.ctypes.data):
            continue  # another thread has freed it
        places += [first + k * HUGE for k in np.flatnonzero((there & 1).mean(axis=1) >= _LEAST).tolist()]
    part = -(-len(places) // STEPS)
    for begin in range(0, len(places), part or 1):  # the system refuses memory that another thread has freed meanwhile
        yield sum(not advise(place, HUGE, _COLLAPSE) for place in places[begin : begin + part])
