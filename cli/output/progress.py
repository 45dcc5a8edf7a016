"""Shows the progress of a run of many steps on stderr: a bar on a terminal, else a line every ten seconds.

A run shorter than a second shows nothing, and neither does a run of a single step, such as a job that generates tokens.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from partc.cli.output import console
from partc.runtime.errors import one_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_QUIET = 1.0
_BETWEEN_LINES = 10.0
_BETWEEN_DRAWS = 0.1


class TrainingBar:
    """A bar with the latest numbers of a training, on a terminal only. Call `close` before other output."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def show(self, step: int, total: int | None, text: str) -> None:
        """Shows the numbers of a step."""
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = _bar("{task.fields[numbers]}")
            self._task = self._bar.add_task("", total=total, numbers="")
        assert self._task is not None
        self._bar.update(self._task, completed=step, total=total, numbers=one_line(text))

    def close(self) -> None:
        """Removes the bar; the next `show` draws it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Progress:
    """The progress of `total` steps, as a context; `reached` may be called at any rate."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._next = time.monotonic() + (_QUIET if sys.stderr.isatty() else _BETWEEN_LINES)
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reached(self, step: int) -> None:
        """Shows the number of steps that are done."""
        now = time.monotonic()
        if step >= self.total:
            self.close()
        if now < self._next or step >= self.total or self.total == 1:
            return
        if not sys.stderr.isatty():
            self._next = now + _BETWEEN_LINES
            console.echo(f"step {step} of {self.total}", err=True)
            return
        self._next = now + _BETWEEN_DRAWS
        if self._bar is None:
            self._bar = _bar("{task.description}")
            self._task = self._bar.add_task("steps", total=self.total)
        assert self._task is not None
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Removes the bar, so that other output may follow."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._next = float("inf")


def _bar(text: str) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn(text, markup=False),
    )
    bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar
