"""The clock of a rank against that of rank 0, by exchanges that all ranks end after all have begun."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Protocol

from ..files.regular import text_of_system

_ROUNDS = 30


class Gathers(Protocol):
    """A rank that exchanges texts with all others."""

    @property
    def rank(self) -> int:
        """Its number."""

    def all_gather_text(self, text: str) -> list[str]:
        """The text of every rank, in order of ranks; collective."""


def clock_offset(
    ranks: Gathers, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> tuple[float, float]:
    """Seconds to add to this rank's clock for that of rank 0, and the largest error of it; collective.

    Processes of one host, by default those of one boot, have one clock: both are 0. Otherwise: a rank ends each exchange after rank 0 has
    begun it, and rank 0 after the rank has, which bounds the difference from both sides; the middle is taken.
    """
    if host is None:
        host = text_of_system("/proc/sys/kernel/random/boot_id").strip() or "?"
    hosts = ranks.all_gather_text(host)
    if len({*hosts}) == 1:
        return 0.0, 0.0
    times = []
    for _ in range(_ROUNDS):
        begun = clock()
        ranks.all_gather_text("")
        times.append((begun, clock()))
    rows = [json.loads(text) for text in ranks.all_gather_text(json.dumps(times))]
    if hosts[ranks.rank] == hosts[0]:
        return 0.0, 0.0
    least = max(first[0] - own[1] for first, own in zip(rows[0], times, strict=True))
    most = min(first[1] - own[0] for first, own in zip(rows[0], times, strict=True))
    return (least + most) / 2, (most - least) / 2
