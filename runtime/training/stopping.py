"""The reasons why a training stops before its last step: a signal, or the end of its time.

    with StopSignals() as signals, load_trainer("build", comm) as trainer:
        for batch in batches:
            trainer.ask_to_stop(signals.received)
            trainer.train(batch)
            if trainer.stopping:                # after the same step on all ranks
                break
        trainer.save("runs")

A reason is a number: that of a signal, or `MAX_TIME`. Another signal requests a trace of the last steps, and training continues.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

NAMES = ("SIGTERM", "SIGUSR1")
"""The signals by which schedulers ask a job to end: SIGTERM when it is preempted or cancelled, SIGUSR1 as `--signal=USR1@90` of Slurm."""
TRACE = "SIGUSR2"
"""The signal that requests a trace."""
MAX_TIME = 1 << 10
"""The reason to stop when the time for training is over."""


class StopSignals:
    """A context that records these signals and suppresses their usual effect; it has no effect outside of the main thread.

    A signal that is ignored at the start, as by nohup, stays ignored. With `traces` it records `TRACE`, too.
    """

    def __init__(self, names: Sequence[str] = NAMES, traces: bool = False) -> None:
        self._names = (*names, TRACE) if traces else tuple(names)
        self.received = 0
        """The number of the first signal that requested a stop; 0 where none has come."""
        self._trace = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name in self._names:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                try:
                    self._before[number] = signal.signal(number, self._note)
                except ValueError:  # not the main thread
                    return self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def pass_on(self, other: StopSignals | None) -> None:
        """Ends the recording.

        A signal that was received is passed to `other` or, if `other` does not record it, raised with its usual effect.
        """
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before.clear()
        for number in filter(None, (self.received, getattr(signal, TRACE, 0) if self._trace else 0)):
            if other is not None and number in other._before:
                other._note(number, None)
            else:
                signal.raise_signal(number)

    def takes_trace(self) -> bool:
        """Whether a trace was requested since the last call."""
        found, self._trace = self._trace, False
        return found

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, TRACE, None):
            self._trace = True
        else:
            self.received = self.received or number


def reason_text(reason: int) -> str:
    """Returns the name of a reason: `SIGTERM`, `max_time`."""
    return "max_time" if reason == MAX_TIME else signal.Signals(reason).name
