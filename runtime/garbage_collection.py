"""When Python's garbage collector looks for reference cycles: not while a program is compiled, nor while modules are imported.

Both make objects that live until the end, and few cycles. The collector would look through all of them again and again, and
free next to nothing.
"""

from __future__ import annotations

import gc
import sys
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
