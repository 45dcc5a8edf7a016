"""The progress of a training: the numbers of a progress line, and the listeners that receive them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from partc.runtime.artifact.training.metric_formula import MetricSums

from .report import Report
from .trainer import Trainer

Metrics: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class Progress:
    """The progress of a training: the steps taken and in total, the epoch, means since the previous progress line, and records per second.

    `total` and `remaining` (in seconds) are None if epochs have no known length.
    """

    step: int
    total: int | None
    epoch: float
    metrics: Metrics
    rate: float
    speed: float
    remaining: float | None
    records: int | None = None
    """The records of the epoch so far, if the total number of records is not known; then `epoch` counts only full epochs."""
    more: Metrics = field(default_factory=dict)
    """The numbers that the plan's `report` requests, except the gradient's norm, which is among the metrics."""


class Listener(Protocol):
    """Receives the progress of a training, on rank 0."""

    def stepped(self, progress: Progress) -> None:
        """A progress line is due: steps were taken."""
        ...

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """The loss of a step, or a gradient, is not finite; a skipped step has changed nothing."""
        ...

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """The model was evaluated."""
        ...

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint was written."""
        ...


class Meter:
    """Sums the loss and the metrics of the steps since the last progress line, and measures their time without evaluations and saves."""

    def __init__(self, trainer: Trainer, batch: int, report: Report | None) -> None:
        self._trainer, self._batch, self._report = trainer, batch, report
        self._totals = MetricSums(trainer.record)
        self.restart()

    def restart(self) -> None:
        """Restarts the measurement of time."""
        self._begun, self._records = time.perf_counter(), 0

    def count(self, outputs: Mapping[str, Any], records: int) -> None:
        """Counts a step whose batch had `records` records."""
        self._totals.add(outputs, records)
        self._records += self._batch
        if self._report is not None:
            self._report.step()

    def take(self, total: int | None, epoch: float, records: int | None) -> Progress:
        """Returns the progress after the last step and resets the sums. Collective where the plan reports numbers of all ranks."""
        passed, step, read = time.perf_counter() - self._begun, self._trainer.step, self._records
        metrics, more = self._totals.take(), {} if self._report is None else self._report.numbers(passed)
        remaining = None if total is None else (total - step) * self._batch * passed / read
        self.restart()
        return Progress(step, total, epoch, metrics, self._trainer.last_rate, read / passed, remaining, records, more)
