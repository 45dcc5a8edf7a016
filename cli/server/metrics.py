"""Counts the server's work, in the text form that Prometheus reads (exposition format 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass
class Seconds:
    """A histogram of times."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    """The number of times in each bucket that are in no smaller bucket; the last number is for times above all buckets."""
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Adds a time."""
        self.counts[bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterator[str]:
        """Yields the samples of the histogram as lines."""
        *counts, number = accumulate(self.counts)
        for most, count in zip(_BUCKETS, counts, strict=True):
            yield f'{name}_bucket{{le="{most}"}} {count}'
        yield f'{name}_bucket{{le="+Inf"}} {number}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {number}"


@dataclass
class Metrics:
    """Counters since the server began, and gauges of its present state."""

    requests: Counter[str] = field(default_factory=Counter)
    """Maps each finish reason, or `refused`, to a number of requests."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restarts: int = 0
    slots: int = 0
    used: int = 0
    waiting: int = 0
    steps: Seconds = field(default_factory=Seconds)
    first: Seconds = field(default_factory=Seconds)

    def text(self) -> str:
        """Returns all metrics as text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("partc_requests_total", "counter", "Requests that ended, by the reason; refused ones too.")
        for reason, count in sorted(self.requests.items()):
            yield f'partc_requests_total{{finish="{reason}"}} {count}'
        for name, kind, about, value in (
            ("partc_prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("partc_cached_tokens_total", "counter", "Tokens of prompts that lay in a cache.", self.cached_tokens),
            ("partc_completion_tokens_total", "counter", "Tokens of answers.", self.completion_tokens),
            ("partc_drafted_tokens_total", "counter", "Tokens that were looked up as drafts.", self.drafted_tokens),
            ("partc_accepted_tokens_total", "counter", "Drafts that were right.", self.accepted_tokens),
            ("partc_restarts_total", "counter", "Times that the ranks were started again.", self.restarts),
            ("partc_slots", "gauge", "Sequences that run at once.", self.slots),
            ("partc_slots_used", "gauge", "Sequences that run now.", self.used),
            ("partc_queue_length", "gauge", "Requests that wait for a slot.", self.waiting),
        ):
            yield from _head(name, kind, about)
            yield f"{name} {value}"
        yield from _head("partc_step_seconds", "histogram", "Time of a step.")
        yield from self.steps.lines("partc_step_seconds")
        yield from _head("partc_first_token_seconds", "histogram", "Time from a request to its first token.")
        yield from self.first.lines("partc_first_token_seconds")


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
