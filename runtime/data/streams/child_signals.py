"""The signal SIGCHLD, for which torch sets a handler where a `DataLoader` is iterated in the main thread, as a user's file may do.

torch's handler raises in the main thread, wherever that is, when a worker has died; the thread that reads finds a dead worker, too. So it
is taken out, and the handler that torch found is set again; what was there before is there when reading has ended.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""A handler as `signal.getsignal` gives it; None: one that Python does not know."""
_DEFAULT: Handler = signal.SIG_DFL


class WithoutTorch:
    """The time in which a loader is read, from `begin` to `end` in the main thread: torch's handler is out of it."""

    def __init__(self) -> None:
        self._before: Handler = None

    def begin(self) -> None:
        """Notes the handler, and takes torch's out."""
        self._before = handler()
        leave_to_the_reader(self._before)

    def end(self) -> None:
        """Sets the handler again that was there, but where the user has set another one meanwhile."""
        before, self._before = self._before, None
        if before is not None and (_is_torchs(handler()) or (_is_torchs(before) and handler() == _found(before))):
            signal.signal(signal.SIGCHLD, before)


def handler() -> Handler:
    """The handler of the signal; None also outside of the main thread, and where there is no such signal."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return None
    return signal.getsignal(signal.SIGCHLD)


def leave_to_the_reader(before: Handler = _DEFAULT) -> None:
    """Takes torch's handler out; where torch found none that is called, the handler is what there was `before` it."""
    now = handler()
    if _is_torchs(now):
        signal.signal(signal.SIGCHLD, _found(now, _DEFAULT if callable(before) or before is None else before))


def _is_torchs(one: Handler) -> bool:
    return callable(one) and getattr(one, "__module__", "").startswith("torch.")


def _found(torchs: Handler, otherwise: Handler = _DEFAULT) -> Handler:
    """The handler that torch found and calls behind its own."""
    known = inspect.getclosurevars(torchs).nonlocals if inspect.isfunction(torchs) else {}
    previous: Handler = known.get("previous_handler")
    return otherwise if previous is None else previous
