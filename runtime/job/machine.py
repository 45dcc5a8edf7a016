"""What the system gives this process of its machine."""

from __future__ import annotations

import os


def usable_cores() -> frozenset[int]:
    """The cores that the system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
