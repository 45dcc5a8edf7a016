"""Records some steps of a program, and the work between them, for a profile or a trace.

    recording = Recording(program, write, range(100, 111))
    for number in steps:
        recording.before(number)
        with recording.between(DATA, number):
            batch = next(batches)
        program(batch)
        recording.after(number)                 # after step 110 all ranks `write`
    recording.end()

Outside of these steps nothing is recorded, and the actions of a step are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..program import Program
    from .profiler import Profiler


class Recording:
    """Records the steps of a rank whose numbers are in the range `steps`; by default all steps, of which the last ones are stored.

    `write` is collective: all ranks call it after the same step. `asked` returns, once for each request, that this rank is requested to
    write a trace of the steps so far.
    """

    def __init__(
        self,
        program: Program,
        write: Callable[[Profiler], None],
        steps: range | None = None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._program, self._write, self._steps = program, write, steps
        self.asked = asked
        self.has_begun = False
        """Whether one of the steps has begun."""
        self._profiler: Profiler | None = None

    @staticmethod
    def off(program: Program) -> Recording:
        """Returns a recording that records nothing."""
        return Recording(program, lambda _: None, range(0))

    def before(self, number: int) -> None:
        """Begins the recording at the first of the steps, before the work for it."""
        if not self.has_begun and (self._steps is None or number in self._steps):
            self.has_begun = True
            self._profiler = self._program.record_times(number)

    def after(self, number: int, asked: bool = False) -> None:
        """Writes and ends after the last of the steps; also writes if the ranks have agreed that one of them is `asked` to."""
        if self._profiler is None:
            return
        if self._steps is not None and number >= self._steps[-1]:
            self.end()
        elif asked:
            self._write(self._profiler)

    def end(self) -> None:
        """Writes the recorded steps and ends, unless it has ended."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._write(profiler)

    def between(self, kind: str, number: int) -> AbstractContextManager[None]:
        """Notes the time of a block that belongs to a step; `kind` is its category in a trace."""
        return nullcontext() if self._profiler is None else _noted(self._profiler, kind, number)


@contextmanager
def _noted(profiler: Profiler, kind: str, number: int) -> Iterator[None]:
    start = time.perf_counter()
    yield
    profiler.note(kind, number, start, time.perf_counter() - start)
