"""Functions of a file of the user's that a training calls on rank 0: `callbacks: watch.py`.

    def on_step(progress): ...                       with each line of the log: progress.step, .epoch, .metrics, .rate, .speed, .remaining
    def on_evaluate(step, epoch, metrics): ...       metrics by name
    def on_save(step, path): ...                     the folder of a checkpoint, which is complete

What one raises ends the job with its file and line. One that has not returned after `stall` seconds is named on stderr, for the other ranks
wait meanwhile.
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UsageError
from ..user_code import user_code
from .progress import Listener, Metrics, Progress

EVENTS = ("on_step", "on_evaluate", "on_save")


class Callbacks:
    """The functions of a module by event. UsageError where it has none, or one for an event that is unknown."""

    def __init__(self, module: ModuleType, where: str, stall: float = 30.0) -> None:
        self._where, self._stall = where, min(stall, threading.TIMEOUT_MAX)
        found = {name: one for name, one in vars(module).items() if name.startswith("on_") and callable(one)}
        for name in found:
            if name not in EVENTS:
                near = difflib.get_close_matches(name, EVENTS, 1)
                help = f"the nearest is {near[0]}" if near else f"they are {', '.join(EVENTS)}"
                raise UsageError(f"{where}: '{name}' is not an event of a training\n  help: {help}")
        if not found:
            raise UsageError(f"{where}: it has no callback\n  help: define {', '.join(EVENTS)}, or one of them")
        self._found: Mapping[str, Callable[..., object]] = found

    def stepped(self, progress: Progress) -> None:
        """Calls `on_step`."""
        self._call("on_step", progress.step, progress)

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """Calls nothing."""

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """Calls `on_evaluate`."""
        self._call("on_evaluate", step, step, epoch, metrics)

    def saved(self, step: int, path: Path) -> None:
        """Calls `on_save`."""
        self._call("on_save", step, step, path)

    def _call(self, event: str, step: int, *given: object) -> None:
        if event in self._found:
            late = (
                f"partc: rank 0 waits for {event} of {self._where}, called after step {step}, for {self._stall:.0f} s"
            )
            told = threading.Timer(self._stall, partial(print, late, file=sys.stderr, flush=True))
            told.daemon = True
            told.start()
            try:
                with user_code(self._where, f"calling {event} after step {step}"):
                    self._found[event](*given)
            finally:
                told.cancel()


class Listeners:
    """Several listeners, told in order."""

    def __init__(self, each: Sequence[Listener]) -> None:
        self._each = each

    def stepped(self, progress: Progress) -> None:
        """As `Listener` says."""
        for one in self._each:
            one.stepped(progress)

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """As `Listener` says."""
        for one in self._each:
            one.not_finite(step, outputs, skipped)

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """As `Listener` says."""
        for one in self._each:
            one.evaluated(step, epoch, metrics)

    def saved(self, step: int, path: Path) -> None:
        """As `Listener` says."""
        for one in self._each:
            one.saved(step, path)
