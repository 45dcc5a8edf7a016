"""Functions in a file of the user's that training calls on rank 0: `callbacks: watch.py`.

    def on_step(progress): ...                      # with each line of the log: progress.step, .epoch, .metrics, .rate, .speed, .remaining
    def on_evaluate(step, epoch, metrics): ...      # metrics by name
    def on_save(step, path): ...                    # the folder of a complete checkpoint

An exception in one of them ends the job with the file and line. One that has not returned after `stall` seconds is reported on stderr,
since the other ranks wait for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UsageError
from ..spellings import nearest
from ..user_code import user_code
from .progress import Listener, Metrics, Progress

EVENTS = ("on_step", "on_evaluate", "on_save")


class Callbacks:
    """The callbacks of a module by event. UsageError where it has none, or one for an unknown event."""

    def __init__(self, module: ModuleType, where: str, stall: float = 30.0) -> None:
        self._where, self._stall = where, min(stall, threading.TIMEOUT_MAX)
        functions = {name: one for name, one in vars(module).items() if name.startswith("on_") and callable(one)}
        for name in functions:
            if name not in EVENTS:
                near = nearest(name, EVENTS, 1)
                help = f"the nearest is {near[0]}" if near else f"they are {', '.join(EVENTS)}"
                raise UsageError(f"{where}: '{name}' is not an event of a training\n  help: {help}")
        if not functions:
            raise UsageError(f"{where}: it has no callback\n  help: define {', '.join(EVENTS)}, or one of them")
        self._found: Mapping[str, Callable[..., object]] = functions

    def stepped(self, progress: Progress) -> None:
        """Calls `on_step`."""
        self._call("on_step", progress.step, progress)

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """Does nothing: there is no callback for this event."""

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """Calls `on_evaluate`."""
        self._call("on_evaluate", step, step, epoch, metrics)

    def saved(self, step: int, path: Path) -> None:
        """Calls `on_save`."""
        self._call("on_save", step, step, path)

    def _call(self, event: str, step: int, *arguments: object) -> None:
        if event in self._found:
            late = (
                f"partc: rank 0 waits for {event} of {self._where}, called after step {step}, for {self._stall:.0f} s"
            )
            timer = threading.Timer(self._stall, partial(print, late, file=sys.stderr, flush=True))
            timer.daemon = True
            timer.start()
            try:
                with user_code(self._where, f"calling {event} after step {step}"):
                    self._found[event](*arguments)
            finally:
                timer.cancel()


class Listeners:
    """Passes each event to several listeners in order."""

    def __init__(self, each: Sequence[Listener]) -> None:
        self._each = each

    def stepped(self, progress: Progress) -> None:
        """Passes the event on, as described in `Listener`."""
        for one in self._each:
            one.stepped(progress)

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """Passes the event on, as described in `Listener`."""
        for one in self._each:
            one.not_finite(step, outputs, skipped)

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """Passes the event on, as described in `Listener`."""
        for one in self._each:
            one.evaluated(step, epoch, metrics)

    def saved(self, step: int, path: Path) -> None:
        """Passes the event on, as described in `Listener`."""
        for one in self._each:
            one.saved(step, path)
