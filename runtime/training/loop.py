"""The loop around the steps: batches in, losses out, evaluation and checkpoints in between, all decided by the number of the step.

Every rank runs the same loop; what is told of it goes to a `Listener`, on rank 0 alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from ..artifact.metric_formula import Totals
from ..data import Loader, Position
from ..errors import InputError, UsageError
from .finite import STOP, WARN, is_finite
from .trainer import Trainer

Every: TypeAlias = int | Literal["epoch"]
Metrics: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class RunConfig:
    """How far training goes and what happens on the way. `steps`, or else `epochs`; without either, one epoch."""

    steps: int | None = None
    epochs: int | None = None
    log: Every = 10
    evaluate: Every = "epoch"
    checkpoint: Path | None = None
    save: Every = "epoch"
    keep: int | None = None

    def total(self, batches: int) -> int:
        """The number of steps where an epoch has so many batches."""
        return self.steps if self.steps is not None else (self.epochs or 1) * batches


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps taken and to take, the epoch, means since the last time, and records a second."""

    step: int
    total: int
    epoch: float
    metrics: Metrics
    rate: float
    speed: float
    remaining: float


class Listener(Protocol):
    """Receives the progress of a training, on rank 0."""

    def stepped(self, progress: Progress) -> None:
        """Some steps are done."""
        ...

    def not_finite(self, step: int, outputs: Mapping[str, Any], skipped: bool) -> None:
        """The loss of a step, or a gradient, is no finite number; a skipped step has changed nothing."""
        ...

    def evaluated(self, step: int, epoch: float, metrics: Metrics) -> None:
        """The model was evaluated."""
        ...

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint was written."""
        ...


def run(
    trainer: Trainer,
    loader: Loader,
    config: RunConfig,
    listener: Listener | None = None,
    test: Callable[[], Iterable[tuple[Mapping[str, Any], int]]] | None = None,
) -> Metrics:
    """Trains as `config` says; the metrics of the last evaluation, else the means over the last steps, on rank 0."""
    order = loader.order
    if not order.batches:
        raise UsageError(
            f"there are {order.records} records, fewer than a batch of {order.batch}\n  help: choose a smaller batch"
        )
    total = config.total(order.batches)
    totals = Totals(trainer.record.formulas, trainer.record.denominators, trainer.record.sums)
    last: Metrics = {}
    begun, records, skipped = time.perf_counter(), 0, trainer.skipped
    while trainer.step < total:
        position, batch = loader.position(), next(loader)
        following = loader.peek() if trainer.step + 1 < total else None
        outputs = _step(trainer, batch, following, position)
        finite = is_finite(outputs.get(trainer.record.loss, 0.0)) and trainer.skipped == skipped
        if finite or trainer.on_nonfinite == WARN:
            totals.add(outputs, order.size(position))
        stops = not finite and trainer.on_nonfinite == STOP
        if not finite and listener and not stops:
            listener.not_finite(trainer.step, trainer.numbers(outputs), trainer.skipped > skipped)
        skipped = trainer.skipped
        records += order.batch
        step, now = trainer.step, loader.position()
        ended = now.epoch != position.epoch
        at = now.epoch + now.batch / order.batches
        if _due(config.log, step, ended, total):
            passed = time.perf_counter() - begun
            last = totals.take()
            progress = Progress(
                step,
                total,
                at,
                last,
                trainer.last_rate,
                records / passed,
                (total - step) * order.batch * passed / records,
            )
            if listener and not stops:
                listener.stepped(progress)
            begun, records = time.perf_counter(), 0
        evaluating = test is not None and _due(config.evaluate, step, ended, total)
        if evaluating and test is not None:
            last = trainer.evaluate(test())
            if listener:
                listener.evaluated(step, at, last)
        if config.checkpoint is not None and _due(config.save, step, ended, total):
            path = trainer.save(config.checkpoint, {"position": [now.epoch, now.batch]}, config.keep)
            if listener:
                listener.saved(step, path)
        if evaluating or config.checkpoint is not None:
            begun, records = time.perf_counter(), 0
    trainer.check_last_loss()
    return last


def _step(
    trainer: Trainer, batch: Mapping[str, Any], following: Mapping[str, Any] | None, position: Position
) -> Mapping[str, Any]:
    """The outputs of a step; the error of a refused batch names its place in the data."""
    try:
        return trainer.advance(batch, following)
    except InputError as error:
        raise InputError(
            f"step {trainer.step + 1}, batch {position.batch} of epoch {position.epoch}: {error}"
        ) from None


def resume(trainer: Trainer, loader: Loader, path: Path, option: str = "") -> None:
    """Resumes from a checkpoint: tensors, the step's number, and the position in the data."""
    meta = trainer.load(path, option)
    match meta.get("position"):
        case [int(epoch), int(batch)]:
            loader.seek(Position(epoch, batch))
        case _:
            loader.seek(Position(*divmod(trainer.step, max(loader.order.batches, 1))))


def _due(every: Every, step: int, ended: bool, total: int) -> bool:
    """Whether an action with the interval `every` is due after a step; after the last step it always is."""
    return step == total or (ended if every == "epoch" else step % every == 0)
