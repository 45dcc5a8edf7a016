"""Thresholds of a review: `bytes>5%`, `memory>100MB`, `messages>0`, `placement>0`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from partc.runtime.units import parse_bytes, seconds

from .compare import Difference
from .facts import IN_BYTES, KINDS, MEASURES, TIME

_FORM = re.compile(r"\s*([a-z]+)\s*>\s*(\S+)\s*", re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%", re.ASCII)
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class Threshold:
    """How much a measure may grow, with `percent` in percent of the first artifact's; or how many facts of a kind may change."""

    text: str
    name: str
    most: float
    percent: bool = False

    def exceeded(self, found: Difference) -> str:
        """By how much a difference is beyond it, as a sentence; empty where it is not."""
        if self.name in KINDS:
            number = len(found.of(self.name))
            return f"{self.text}: {number:,} changed" if number > self.most else ""
        one = next(one for one in found.measures if one.name == self.name)
        grown = one.percent if self.percent else one.grown
        shown = (seconds(size / 1e9) if self.name == TIME else f"{size:,}" for size in (one.before, one.after))
        return f"{self.text}: {' became '.join(shown)}, {one.percent:+.3g} %" if grown > self.most else ""


def parse_threshold(text: str) -> Threshold:
    """A threshold from its text; ValueError says what is wrong."""
    form = _FORM.fullmatch(text)
    known = ", ".join([*MEASURES, *KINDS])
    if form is None:
        raise ValueError(f"'{text}' is not NAME>AMOUNT, such as bytes>5%, memory>100MB or placement>0")
    name, amount = form.groups()
    if name not in MEASURES and name not in KINDS:
        raise ValueError(f"'{text}': '{name}' is not compared; these are: {known}")
    forms = ["a percentage"] if name in MEASURES else []
    if name != TIME:
        forms.append("bytes" if name in IN_BYTES else "a number")
    if name in MEASURES and (percent := _PERCENT.fullmatch(amount)):
        return Threshold(text, name, float(percent[1]), percent=True)
    if "bytes" in forms and (bytes := parse_bytes(amount)) is not None:
        return Threshold(text, name, bytes)
    if "a number" in forms and _WHOLE.fullmatch(amount):
        return Threshold(text, name, int(amount))
    raise ValueError(f"'{text}': '{amount}' is not an amount of {name}; that is {' or '.join(forms)}")


def exceeded(thresholds: Sequence[Threshold], found: Sequence[Difference]) -> list[str]:
    """What is beyond the thresholds in any program, with its name where there are several."""
    return [
        f"{one.program}: {text}" if len(found) > 1 else text
        for one in found
        for threshold in thresholds
        if (text := threshold.exceeded(one))
    ]
