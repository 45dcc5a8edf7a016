"""The line that a command prints about the times of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from partc.runtime.units import count, seconds


def timing(loaded: float, times: Sequence[float]) -> str:
    """The line for a load time and the times of all steps, in seconds; the first step is apart, since it warms up.

    loaded in 412 ms, first step 12.3 ms, then 99 steps: median 1.02 ms, min 998 us, p90 1.2 ms; 968 steps/s
    """
    text = f"loaded in {seconds(loaded)}, first step {seconds(times[0])}"
    rest = sorted(times[1:])
    if not rest:
        return text
    p90 = rest[min(len(rest) - 1, round(0.9 * (len(rest) - 1)))]
    times_text = f"median {seconds(statistics.median(rest))}, min {seconds(rest[0])}, p90 {seconds(p90)}"
    return f"{text}, then {count(len(rest), 'step')}: {times_text}; {len(rest) / sum(rest):,.4g} steps/s"
