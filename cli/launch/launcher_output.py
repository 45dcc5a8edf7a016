"""Separates a launcher's own messages from the ranks' output, and reads from them which rank ended, and how.

Launchers explain the end of a rank in many lines, after the rank itself has reported its error. Those lines are held back and
shown only if there is no better message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankEnd:
    """A rank's end according to the launcher; the rank or its process id is None if the launcher does not name it.

    `host`: where the rank was, if others only saw that their connection to it was closed; empty if they do not say where.
    """

    rank: int | None = None
    pid: int | None = None
    signal: int | None = None
    code: int | None = None
    host: str | None = None


_ENDS: tuple[tuple[str, Callable[[re.Match[str]], RankEnd]], ...] = (
    (
        r"process rank (\d+) with PID (\d+) on node \S+ exited on\s+signal (\d+)",
        lambda found: RankEnd(rank=int(found[1]), pid=int(found[2]) or None, signal=int(found[3])),
    ),
    (
        r"process rank (\d+) with PID (\d+) on node \S+ exiting\s+improperly",
        lambda found: RankEnd(rank=int(found[1]), pid=int(found[2]), code=0),
    ),
    (
        r"Process name: \[\S*?,(\d+)\]\s+Exit code:\s+(\d+)",
        lambda found: RankEnd(rank=int(found[1]), code=int(found[2])),
    ),
    (
        r"PID (\d+) RUNNING AT \S+\s+=\s+EXIT CODE: (\d+)",
        lambda found: _hydra(int(found[1]), int(found[2])),
    ),
    (r"srun: error: \S+: tasks? (\d+)\S*: Killed", lambda found: RankEnd(rank=int(found[1]), signal=9)),
    (r"srun: error: \S+: tasks? (\d+)\S*: Segmentation fault", lambda found: RankEnd(rank=int(found[1]), signal=11)),
    (
        r"srun: error: \S+: tasks? (\d+)\S*: Exited with exit code (\d+)",
        lambda found: RankEnd(rank=int(found[1]), code=int(found[2])),
    ),
    (
        r"peer process has unexpectedly disconnected[\s\S]*?Peer host:\s+(\S+)",
        lambda found: RankEnd(host=found[1]),
    ),
    (
        r"\*\*\* An error occurred in Socket closed",
        lambda found: RankEnd(host=""),
    ),
)
"""What launchers say, the most telling first."""

_FENCE = re.compile(r"^(-{60,}|={60,})$")
_LINE = re.compile(
    r"^\[[^\]\s]+:\d+\] |^\[[^\]\s]+\]\[\[\d+,\d+\],\d+\]\["
    r"|^\[warn\] |^srun: |^slurmstepd: |^Abort\(-?\d+\) on node \d+|^\[(mpiexec|proxy)[^\]]*\]"
    r"|^YOUR APPLICATION TERMINATED WITH|^This typically refers to a problem with your application|"
    r"^Please see the FAQ page for debugging"
)


def _hydra(pid: int, code: int) -> RankEnd:
    """Hydra reports a signal as an exit code below 32, or as the shell does, above 128."""
    if code > 128:
        return RankEnd(pid=pid, signal=code - 128)
    return RankEnd(pid=pid, signal=code) if code in (4, 6, 7, 8, 9, 11, 15) else RankEnd(pid=pid, code=code)


@dataclass
class LauncherOutput:
    """The launcher's lines so far; `hold` says of each new line whether it is one."""

    lines: list[str] = field(default_factory=list)
    fenced: bool = False

    def hold(self, line: str) -> bool:
        """Whether the line is the launcher's own; if so it is held back here."""
        text = line.rstrip("\r\n ")
        fence = _FENCE.match(text) is not None
        held = fence or self.fenced or _LINE.match(text) is not None or (text == "" and bool(self.lines))
        self.fenced ^= fence
        if held:
            self.lines.append(text)
        return held

    def ended(self) -> RankEnd | None:
        """How a rank ended, if the launcher has reported it."""
        text = "\n".join(self.lines)
        for pattern, read in _ENDS:
            if found := re.search(pattern, text):
                return read(found)
        return None
