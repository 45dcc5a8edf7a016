"""Turns Python's garbage collector off while a program is compiled and while modules are imported.

Both create objects that live until the end, and few reference cycles. The collector would search all of them again and again, and free next
to nothing.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Blocks:
    """Counts the open blocks, of all threads, that need the collector off.

    The first block turns the collector off; the last turns it on again, if it was on before.
    """

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
    """A block, or a decorated function, without collection of reference cycles; it must not run the user's code."""
    _blocks.enter()
    try:
        yield
    finally:
        _blocks.leave()


@contextmanager
def importing() -> Iterator[None]:
    """A block with the imports of a command: the objects that exist at its end are exempt from collection for good.

    They live until the process ends; otherwise the first collection after the block would search all of them. A block that imports no new
    module exempts nothing.
    """
    with uncollected():
        known = len(sys.modules)
        yield
        if len(sys.modules) > known:
            gc.freeze()


@contextmanager
def kept() -> Iterator[None]:
    """A block after which the command soon ends: the objects that exist at its end are exempt from collection for good."""
    with uncollected():
        yield
        gc.freeze()
