"""The memory of this process by Linux's own counts: what is resident, what of it is no file's, and the most there ever was.

memory = Memory(); ...; memory.note("loaded"); ...; memory.said()     MB beyond those at the beginning, as JSON
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

_KEYS = {"VmRSS": "resident", "RssAnon": "anonymous", "VmHWM": "peak"}
_REFS = Path("/proc/self/clear_refs")


class Memory:
    """Counts from here on. The peak begins anew where the system lets it."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            _REFS.write_text("5")
        self.start = _now()
        self.notes: dict[str, dict[str, float]] = {}

    def note(self, when: str) -> None:
        """Counts now, under a name."""
        now = _now()
        self.notes[when] = {name: round(now[name] - self.start[name], 1) for name in ("resident", "anonymous")}

    def said(self) -> str:
        """All notes, those of the end, and the peak."""
        self.note("end")
        peak = round(_now()["peak"] - self.start["resident"], 1)
        return json.dumps({"begin": self.start, "notes": self.notes, "peak": peak})


def _now() -> dict[str, float]:
    """The counts in MB."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in _KEYS:
            found[_KEYS[key]] = int(rest.split()[0]) / 1024
    return found
