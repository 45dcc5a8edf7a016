"""The progress of a training: the numbers of a progress line, and the listeners that receive them.

Computes further numbers of progress lines, over all ranks: `report: [parameter_norm, tokens, memory]`.

The step itself computes `gradient_norm`.

    parameter_norm      the norm of all trained parameters together, in which each element counts once
    tokens_per_second   elements of the first integer input with two dims or more, such as the ids of (batch, seq)
    memory_bytes        the largest resident memory of a rank's process
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.training.metric_formula import MetricSums

from ..checkpoint.ownership import owners
from ..errors import UsageError
from ..files.regular import text_of_system
from .trainer import Trainer

_AT_ONCE = 1 << 16
_INTEGERS = ("tensor(int64)", "tensor(int32)")


class Report:
    """Computes the numbers in `wanted`; UsageError where tokens are requested and no input has any."""

    def __init__(self, trainer: Trainer, wanted: Sequence[str]) -> None:
        self._trainer, self._wanted = trainer, frozenset(wanted)
        self._tokens = 0
        trained = {one.tensor for one in trainer.manifest.state if one.kind == "parameter" and one.next}
        self._owned = {
            one.value: one
            for some in owners([one for one in trainer.manifest.state if one.tensor in trained]).values()
            for one in some
            if one.rank == trainer.rank
        }
        ports = [one for one in trainer.ports if one.type in _INTEGERS and len(one.shape or ()) > 1]
        if "tokens" in self._wanted and not ports:
            raise UsageError("report: no input of integers has two dims, as token ids have\n  help: leave tokens out")
        symbols = trainer.manifest.symbols
        self._ids = [parse(dim, symbols) for dim in ports[0].shape or () if dim is not None] if ports else []

    def step(self) -> None:
        """Counts the tokens of the last step."""
        if "tokens" in self._wanted:
            sizes = self._trainer.program.agreement.sizes
            self._tokens += math.prod(dim(sizes) for dim in self._ids)

    def numbers(self, seconds: float) -> dict[str, float]:
        """Returns the numbers for the steps since the last call, which took `seconds`; collective."""
        numbers: dict[str, float] = {}
        if "parameter_norm" in self._wanted:
            squares = self._trainer.program.all_gather_text(repr(self._squares()))
            numbers["parameter_norm"] = math.sqrt(math.fsum(map(float, squares)))
        if "tokens" in self._wanted:
            numbers["tokens_per_second"], self._tokens = self._tokens / seconds, 0
        if "memory" in self._wanted:
            numbers["memory_bytes"] = max(map(float, self._trainer.program.all_gather_text(str(_resident()))))
        return numbers

    def _squares(self) -> float:
        """Returns the sum of squares over the elements of parameters that this rank owns."""
        terms = []
        for record, array in self._trainer.program.state.arrays():
            if (one := self._owned.get(record.value)) is not None:
                flat = np.ascontiguousarray(array[one.region.inside(one.held)]).reshape(-1)
                for at in range(0, flat.size, _AT_ONCE):
                    part = flat[at : at + _AT_ONCE].astype(np.float64)
                    terms.append(float(part @ part))
        return math.fsum(terms)


def _resident() -> int:
    """Returns the resident memory of this process in bytes; its peak on systems without /proc."""
    fields = text_of_system("/proc/self/statm").split()
    if len(fields) > 1:
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
