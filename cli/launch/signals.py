"""Records the signals that ask a process to end, so that the job can end in order, the launcher first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_ASKING = ("SIGINT", "SIGTERM", "SIGHUP")


class Signals:
    """A context that records which signals have come. A signal that is ignored at the start (nohup) stays ignored."""

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for name in _ASKING:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int | None:
        """The exit code that the first signal asks for; None where none has come."""
        return 128 + self.noted[0] if self.noted else None

    @property
    def again(self) -> bool:
        """Whether a second signal has come: the user does not want to wait."""
        return len(self.noted) > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)
