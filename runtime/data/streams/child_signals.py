"""The signal SIGCHLD, for which torch sets a handler where a `DataLoader` is iterated in the main thread, as a user's file may do.

torch's handler raises in the main thread, wherever that is, when a worker has died; the thread that reads finds a dead worker, too. So it
is taken out while a loader is read.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""A handler as `signal.getsignal` returns it; None: one that Python does not know."""


class WithoutTorch:
    """A block, or the time from `begin` to `end`: afterwards the handler is the one before, or one that the user has set."""

    def __init__(self) -> None:
        self._before: Handler = None

    def begin(self) -> None:
        """Notes the handler; torch's gives way to the default."""
        self._before = _handler()
        if _is_torchs(self._before):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def end(self) -> None:
        """Sets the handler again that was there."""
        before, now, self._before = self._before, _handler(), None
        if before is not None and (_is_torchs(now) or (_is_torchs(before) and now == signal.SIG_DFL)):
            signal.signal(signal.SIGCHLD, before)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()


def _handler() -> Handler:
    """The handler of the signal; None also outside of the main thread, and where there is no such signal."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return None
    return signal.getsignal(signal.SIGCHLD)


def _is_torchs(handler: Handler) -> bool:
    return callable(handler) and getattr(handler, "__module__", "").startswith("torch.")
