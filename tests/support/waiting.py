"""Waits of tests: for a condition, never for a time, since a machine that does much else takes long for everything."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG = 120.0
"""Seconds after which what a test waits for counts as never coming."""


def comes(condition: Callable[[], object], seconds: float = LONG) -> bool:
    """Whether a condition holds before the seconds are over."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def until(condition: Callable[[], object], seconds: float = LONG) -> None:
    """Returns when a condition holds, and fails where it never does."""
    assert comes(condition, seconds), "it never came"
