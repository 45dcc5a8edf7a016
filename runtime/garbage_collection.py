"""When Python's garbage collector looks for reference cycles: not while a program is compiled, nor while modules are imported.

Both make objects that live until the end, and few cycles. The collector would look through all of them again and again, and
free next to nothing. So it does not look through them when the block ends either: they count as old, and the cycles among them are freed
with the next collection of old objects, or before another block when many objects have been made since the last one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 500_000
"""So many objects of blocks that have ended may wait for a collection."""


@contextmanager
def uncollected() -> Iterator[None]:
    """A block, or a function that this decorates, within which reference cycles stay; none of the user's code runs there."""
    if not gc.isenabled():
        yield
        return
    if _waiting[0] > MANY:
        gc.collect()
        _waiting[0] = 0
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what a user's program has frozen stays so
            _waiting[0] += gc.get_count()[0]
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


_waiting = [0]
"""How many objects of blocks that have ended no collection has looked through."""
