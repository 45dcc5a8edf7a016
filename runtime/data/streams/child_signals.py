"""Removes torch's handler of SIGCHLD, which it installs when a `DataLoader` is iterated in the main thread, as a user's file may do.

When a worker has died, torch's handler raises in the main thread, wherever that is; the thread that reads notices a dead worker anyway. So
the handler is removed while a loader is read.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""A handler as `signal.getsignal` returns it; None for a handler that was not installed from Python."""


class WithoutTorch:
    """A block, or the time from `begin` to `end`, without torch's handler.

    Afterwards the previous handler is installed again, unless the user has set another.
    """

    def __init__(self) -> None:
        self._before: Handler = None

    def begin(self) -> None:
        """Stores the current handler; if it is torch's, the default takes its place."""
        self._before = _handler()
        if _is_torchs(self._before):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def end(self) -> None:
        """Restores the stored handler, unless the user has set another."""
        before, now, self._before = self._before, _handler(), None
        if before is not None and (_is_torchs(now) or (_is_torchs(before) and now == signal.SIG_DFL)):
            signal.signal(signal.SIGCHLD, before)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()


def _handler() -> Handler:
    """Returns the handler of SIGCHLD; None also outside of the main thread, and on systems without this signal."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return None
    return signal.getsignal(signal.SIGCHLD)


def _is_torchs(handler: Handler) -> bool:
    return callable(handler) and getattr(handler, "__module__", "").startswith("torch.")
