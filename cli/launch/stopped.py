"""Reports processes that hold a job up and that no rank can report: the launcher, all remaining ranks, or a rank that has not begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from partc.cli.output import console
from partc.runtime.job.status_board import states

_BETWEEN = 0.25
_STOPPED = ("T", "t")
_ENDED = ("", "Z", "X")


class Stopped:
    """The watch over a job's processes; `look` is called several times a second.

    `local`: whether all ranks are processes of this machine, which note their process ids as the first thing that they do.
    """

    def __init__(self, stall: float, local: bool = False) -> None:
        self.stall = stall
        self.local = local
        self._looked = 0.0
        self._since: float | None = None
        self._report = stall

    def look(self, launcher: int, ranks: Callable[[], Sequence[int]]) -> None:
        """Prints one line on stderr if the job cannot go on, after `stall` seconds, and again after twice as long.

        `ranks`: reads their process ids, 0 of one that has none; not called at each look.
        """
        now = time.monotonic()
        if now - self._looked < _BETWEEN:
            return
        self._looked = now
        what = _what(launcher, ranks(), self.local)
        if not what:
            self._since, self._report = None, self.stall
            return
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if waited >= self._report:
            self._report = 2 * waited
            console.echo(f"partc: the job has waited {waited:.0f} s: {what}", err=True)


def _what(launcher: int, ranks: Sequence[int], local: bool) -> str:
    if states([launcher]) in [[letter] for letter in _STOPPED]:
        return f"the launcher (process {launcher}) is stopped"
    missing = [rank for rank, pid in enumerate(ranks) if not pid] if local else []
    if missing:
        names = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        return f"{names} not begun: stopped, or still loading Python"
    begun = [(rank, pid) for rank, pid in enumerate(ranks) if pid]
    found = [(rank, pid, state) for (rank, pid), state in zip(begun, states([pid for _, pid in begun]), strict=True)]
    there = [one for one in found if one[2] not in _ENDED]
    if not there or not all(state in _STOPPED for _, _, state in there):
        return ""
    return "; ".join(f"rank {rank} (process {pid}) is stopped" for rank, pid, _ in there)
