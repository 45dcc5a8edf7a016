"""When Python's garbage collector looks for reference cycles: not while a program is compiled, nor while modules are imported.

Both make objects that live until the end, and few cycles. The collector would look through all of them again and again, and
free next to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block, or a function that this decorates, within which reference cycles stay; none of the user's code runs there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
