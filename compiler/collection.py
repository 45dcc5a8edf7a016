"""When Python looks for circles of garbage: not while a program is compiled.

Passes make millions of objects that live until the end, and few circles. Looking through all of them again and again took a quarter of a
compile and freed next to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block, or a function that this decorates, within which circles of garbage stay; none of the user's code runs there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
