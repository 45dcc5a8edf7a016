"""Shows the progress of a compile: on a terminal after a second, and with `-v` every pass with its time."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from partc.cli.output.console import detail, is_quiet
from partc.runtime.units import seconds

if TYPE_CHECKING:
    from rich.status import Status

_QUIET = 1.0


class CompileProgress:
    """A callback for the name of each pass that begins; at its exit, the context manager clears its output."""

    def __init__(self) -> None:
        self._name, self._since = "", time.perf_counter()
        self.spent: dict[str, float] = {}
        """Maps the name of each pass that has ended to its seconds."""
        self._status: Status | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> CompileProgress:
        if sys.stderr.isatty() and not is_quiet():
            self._timer = threading.Timer(_QUIET, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self("")
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._status is not None:
            self._status.stop()

    def __call__(self, name: str) -> None:
        """Begins a pass, and ends the one before it."""
        now = time.perf_counter()
        if self._name:
            self.spent[self._name] = now - self._since
            detail(f"{self._name}: {seconds(now - self._since)}")
        self._name, self._since = name, now
        if self._status is not None:
            self._status.update(name)

    def _show(self) -> None:
        from rich.console import Console

        self._status = Console(stderr=True).status(self._name)
        self._status.start()
