"""Why a training stops before its last step: a signal, or the end of its time.

    with StopSignals() as signals, load_trainer("build", comm) as trainer:
        for batch in batches:
            trainer.ask_to_stop(signals.received)
            trainer.train(batch)
            if trainer.stopping:                       # after the same step on all ranks
                break
        trainer.save("runs")

A reason is a number: that of a signal, or `MAX_TIME`. Another signal asks for a trace of the last steps, and training goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

NAMES = ("SIGTERM", "SIGUSR1")
"""The signals by which schedulers ask a job to end: SIGTERM when it is preempted or cancelled, SIGUSR1 as `--signal=USR1@90` of Slurm."""
TRACE = "SIGUSR2"
"""The signal that asks for a trace."""
MAX_TIME = 1 << 10
"""The reason to stop when the time of a training is over."""


class StopSignals:
    """A context that notes these signals in place of what they do otherwise; nothing outside of the main thread, which alone gets them.

    One that is ignored at the start, as by nohup, stays ignored. With `traces` it notes `TRACE`, too.
    """

    def __init__(self, names: Sequence[str] = NAMES, traces: bool = False) -> None:
        self._names = (*names, TRACE) if traces else tuple(names)
        self.received = 0
        """The number of the first signal that asked to stop; 0: none did."""
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
        """Notes nothing from here on: a signal that has come is the other's, or, if that does not note it, does what it does otherwise."""
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
        """Whether a trace was asked for since the last call."""
        found, self._trace = self._trace, False
        return found

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, TRACE, None):
            self._trace = True
        else:
            self.received = self.received or number


def reason_text(reason: int) -> str:
    """A reason in words: `SIGTERM`, `max_time`."""
    return "max_time" if reason == MAX_TIME else signal.Signals(reason).name
