"""When Python's garbage collector looks for reference cycles: not while a program is compiled, nor while modules are imported.

Both make objects that live until the end, and few cycles. The collector would look through all of them again and again, and
free next to nothing.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Blocks:
    """The blocks of all threads within which cycles stay: the first turns the collector off, and the last on again, where it was on."""

    def __init__(self) -> None:
        self._lock, self._open, self._collects = threading.Lock(), 0, False

    def enter(self) -> None:
        with self._lock:
            if not self._open:
                self._collects = gc.isenabled()
                gc.disable()
            self._open += 1

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open and self._collects:
                gc.enable()


_blocks = _Blocks()


@contextmanager
def uncollected() -> Iterator[None]:
    """A block, or a function that this decorates, within which reference cycles stay; none of the user's code runs there."""
    _blocks.enter()
    try:
        yield
    finally:
        _blocks.leave()


@contextmanager
def importing() -> Iterator[None]:
    """A block with the imports of a command: what they make lives until the process ends, and is kept from the collector for good.

    Otherwise the first collection after the block would look through all of it. A block that imports nothing new keeps nothing.
    """
    with uncollected():
        known = len(sys.modules)
        yield
        if len(sys.modules) > known:
            gc.freeze()


@contextmanager
def kept() -> Iterator[None]:
    """A block of a command that ends soon behind it: what it makes is kept from the collector for good."""
    with uncollected():
        yield
        gc.freeze()
