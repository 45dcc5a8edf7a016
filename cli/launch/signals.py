"""Records the signals that ask a process to end, so that the job can end in order, the launcher first.

The handlers raise no exception: one raised while a launcher is being started would leave it running alone.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType

from partc.cli.interruption import must_end, refuse_stopped

_ASKING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


class Signals:
    """A context that records the signals that arrive. A signal that is ignored at the start (nohup) stays ignored.

    `asking`: names of signals that ask the ranks to save and end. The first one goes to `passed`, to be passed on; a second SIGTERM counts
    as any other signal, and with `once` so does every second one. `handed`: the name of a signal for rank 0 alone, which ends nothing.
    """

    def __init__(self, asking: Sequence[str] = (), once: bool = False, handed: str = "") -> None:
        self._once = once
        self.noted: list[int] = []
        self.passed = 0
        self._asking = {int(getattr(signal, name)) for name in asking if hasattr(signal, name)}
        self._asked: set[int] = set()
        self._handed: int | None = getattr(signal, handed, None) if handed else None
        self.has_handed = False
        """Whether the `handed` signal has arrived and is to be passed to rank 0."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        refuse_stopped()
        for number in {*(getattr(signal, name, None) for name in _ASKING), *self._asking, self._handed}:
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def is_requested(self) -> bool:
        """Whether the ranks have been asked to save and end, or will be."""
        return bool(self._asked)

    def give_up(self) -> None:
        """Counts a request to save as a request to end: the launcher has received the signal too, and ended the ranks before they saved."""
        self.noted += [] if self.noted else sorted(self._asked)[:1]

    @property
    def exit_code(self) -> int | None:
        """The exit code of the first signal; None if no signal has arrived."""
        return 128 + self.noted[0] if self.noted else None

    @property
    def again(self) -> bool:
        """Whether a second signal has arrived: the user does not want to wait."""
        return len(self.noted) > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == self._handed:
            self.has_handed = True
            return
        again = bool(self._asked) if self._once else number in self._asked and number == signal.SIGTERM
        if number in self._asking and not again:
            self.passed = self.passed if self._asked else number
            self._asked.add(number)
        else:
            self.noted.append(number)
            must_end(number)
