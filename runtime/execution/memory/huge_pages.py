"""Memory in huge pages: what steps read whole, as those that make tokens read all weights, a core reads faster in pages of 2 MB.

onnxruntime packs weights into new memory, which the system gives in pages of 4 KB unless it is asked for others: 13,000 of them for 54 MB,
of which each has to be looked up at each step, and at each the core's reading ahead ends. Where the system may give huge pages only to
those that ask (`madvise`, the usual setting), Linux makes them of pages that are there, from version 6.1 on (`MADV_COLLAPSE`).

That copies all weights, which takes as long as the rest of a load in four bits, and pays after some hundred tokens. So steps make them,
a few each.
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
"""After so many steps all memory is in huge pages."""
_COLLAPSE = 25
_LEAST = 0.9
"""The share of a huge page that must be in use before it is one: between weights in malloc's heap a few pages have been given back."""


def huge_pages() -> Iterator[int]:
    """Makes huge pages of the memory of this process that is there but for a tenth at most, and gives how many it made, in `STEPS` parts.

    None where the system makes none; what is mapped from files stays as it is.
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
            continue  # another thread has given it back
        places += [first + k * HUGE for k in np.flatnonzero((there & 1).mean(axis=1) >= _LEAST).tolist()]
    part = -(-len(places) // STEPS)
    for begin in range(0, len(places), part or 1):  # what another thread has given back meanwhile is refused
        yield sum(not advise(place, HUGE, _COLLAPSE) for place in places[begin : begin + part])
