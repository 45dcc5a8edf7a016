"""Numbers as the commands print them: bytes, durations, counts with their noun, times of steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def size(count: int) -> str:
    """Bytes for people: three digits and a binary unit: `812 B`, `1.25 KiB`, `30.0 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    value, unit = count / 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def seconds(duration: float) -> str:
    """A duration for people: three digits and a unit: `1.23 s`, `45.6 ms`, `789 us`."""
    scale, unit = (1.0, "s") if duration >= 1 else (1e-3, "ms") if duration >= 1e-3 else (1e-6, "us")
    return f"{duration / scale:.3g} {unit}" if duration / scale < 999.5 else f"{duration / scale:.0f} {unit}"


def count(number: int, word: str, words: str = "") -> str:
    """A number with its word in the right form: `1 rank`, `5 ranks`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {words or word + 's'}"


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
