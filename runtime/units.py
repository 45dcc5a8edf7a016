"""Quantities as people write and read them: sizes, durations, operations, counts with their noun; and lists that show the first items."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)\s*(d|h|min|m|s)\s*)+", re.ASCII)
_PART_OF_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d*)?(?:e-?\d+)?) ?(ns|us|ms|s|)", re.ASCII)
_OPERATIONS = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)FLOP", re.ASCII)
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}
FORMS = "a number of bytes, or a text such as 64MB, 1.5GB or 512KiB"
"""The texts that `parse_bytes` accepts, for messages."""
DURATIONS = "a number of at least 0 with ns, us, ms or s, such as 1.2ms"
OPERATIONS = "a number of operations with its unit, such as 33.6 MFLOP"
"""The texts that `parse_duration` (above) and `parse_operations` accept, for messages."""
_SHORT = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(text: str) -> int | None:
    """Returns the bytes of `8GB` (1000^3), `512MiB` (1024^2), `1.5g` or `1000000`, in any case; None for a text that is not a size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    scale: int = (1024 if found[3] else 1000) ** " KMGT".index((found[2] or " ").upper())
    return round(float(found[1]) * scale)


def parse_seconds(text: str) -> float | None:
    """Returns the seconds of `90`, `11h 50min`, `1.5h`, `90s`, or of Slurm's `11:50:00` and `1-12:00:00`; None for any other text."""
    if (clock := _CLOCK.fullmatch(text.strip())) is not None:
        days, hours, minutes, seconds = (float(one or 0) for one in clock.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    if _NUMBER.fullmatch(text.strip()) is not None:
        return float(text)
    if _TIME.fullmatch(text.strip()) is None:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART_OF_TIME.findall(text))


def parse_duration(text: str) -> float | None:
    """Returns the seconds of `1.2ms`, `789 us` or `0.5` (in seconds); None for any other text."""
    found = _DURATION.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _SHORT[found[2]]


def parse_operations(text: str) -> float | None:
    """Returns the number of operations of `33.6 MFLOP` (1000^2); None for any other text."""
    found = _OPERATIONS.fullmatch(text.strip())
    return None if found is None else float(found[1]) * 1000.0 ** " KMGT".index(found[2].upper() or " ")


def operations_text(count: float) -> str:
    """Formats a number of operations with three digits and a decimal unit: `33.6 MFLOP`."""
    power = next((power for power in (4, 3, 2, 1) if count >= 999.5 * 1000 ** (power - 1)), 0)
    value, unit = count / 1000**power, " kMGT"[power].strip()
    return f"{value:.{0 if not power or value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}FLOP"


def size_text(count: float, at_least: bool = False) -> str:
    """Formats bytes with three digits and a binary unit: `812 B`, `1.25 KiB`, `30.0 MiB`. `at_least`: rounded up, not to the nearest."""
    if count < 1024:
        return f"{math.ceil(count) if at_least else count:.4g} B"
    power = min(len(_UNITS) - 1, (int(count).bit_length() - 1) // 10)
    value, unit = count / 1024**power, _UNITS[power]
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{math.ceil(value * 10**digits) / 10**digits if at_least else value:.{digits}f} {unit}"


def seconds(duration: float) -> str:
    """Formats a duration in seconds with three digits and a unit: `1.23 s`, `45.6 ms`, `789 us`."""
    scale, unit = (1.0, "s") if duration >= 1 else (1e-3, "ms") if duration >= 1e-3 else (1e-6, "us")
    return f"{duration / scale:.3g} {unit}" if duration / scale < 999.5 else f"{duration / scale:.0f} {unit}"


def first_of(texts: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Joins the first `most` texts, and counts the rest: `a, b, c and 4 more`."""
    return between.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def count(number: int, word: str, words: str = "") -> str:
    """Formats a number with its noun, singular or plural: `1 rank`, `5 ranks`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {words or word + 's'}"
