"""The loop around the steps: batches in, losses out, evaluation and checkpoints in between, all decided by the number of the step.

Every rank runs the same loop; its events go to a `Listener`, on rank 0 only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from partc.runtime.artifact.training.metric_formula import Totals
from partc.runtime.artifact.training.train_settings import LoopSettings
from pydantic import JsonValue

from ..data import Loader, Position
from ..errors import InputError, UsageError
from .best import EARLY_STOP, Judged
from .finite import STOP, WARN, is_finite
from .report import Report
from .stopping import MAX_TIME
from .trainer import Trainer

Metrics: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps taken and to take, the epoch, means since the last time, and records a second.

    `total` and `remaining` are None where epochs of unknown length are counted.
    """

    step: int
    total: int | None
    epoch: float
    metrics: Metrics
    rate: float
    speed: float
    remaining: float | None
    records: int | None = None
    """The records of the epoch so far, where it is not known how many it has; then `epoch` counts whole ones."""
    more: Metrics = field(default_factory=dict)
    """The further numbers that the plan's `report` asks for, but for the gradient's norm, which is among the metrics."""


class Listener(Protocol):
    """Receives the progress of a training, on rank 0."""

    def stepped(self, progress: Progress) -> None:
        """Some steps are done."""
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


@dataclass(frozen=True)
class Ended:
    """How a training has ended, on every rank.

    `metrics`: of the last evaluation, else means over the last steps; on rank 0. `reason`: why before the last step, 0 where it took all.
    """

    metrics: Metrics
    reason: int = 0


def run(
    trainer: Trainer,
    loader: Loader,
    settings: LoopSettings,
    listener: Listener | None = None,
    test: Callable[[], Iterable[tuple[Mapping[str, Any], int]]] | None = None,
    received: Callable[[], int] = lambda: 0,
    began: float | None = None,
    resumed: Mapping[str, JsonValue] | None = None,
) -> Ended:
    """Trains as the settings say, or until some rank has `received` a reason to stop, or the time is over that `began` then.

    All ranks stop after the same step, evaluate where that is due, and save. `resumed` is what `resume` returned.
    """
    start = time.perf_counter() if began is None else began
    if loader.batches == 0:
        raise UsageError(
            f"there are {loader.records} records, fewer than a batch of {loader.batch}\n  help: choose a smaller batch"
        )
    total = settings.total_steps(loader.batches)
    epochs = (settings.epochs or 1) if total is None else None
    totals = Totals(trainer.record)
    last: Metrics = {}
    kept = settings.checkpoint
    judged = Judged(settings, trainer.record.loss, resumed or {})
    if trainer.program.any_rank(judged.is_over):
        return Ended(last, EARLY_STOP)
    saving: tuple[int, Path] | None = None
    report = Report(trainer, settings.report) if settings.report else None
    begun, records, skipped = time.perf_counter(), 0, trainer.skipped
    final = False
    while not final and (loader.position().epoch < epochs if epochs is not None else trainer.step < (total or 0)):
        position, batch = loader.position(), next(loader)
        now, size = loader.position(), loader.size
        ended = now.epoch != position.epoch
        final = trainer.step + 1 == total if epochs is None else now.epoch >= epochs
        evaluating = test is not None and _due(settings.evaluate, trainer.step + 1, ended, final)
        may_end = final or (evaluating and settings.early_stop is not None)
        following = None if may_end else loader.peek()
        late = trainer.rank == 0 and settings.max_time is not None and time.perf_counter() - start > settings.max_time
        trainer.ask_to_stop(received() or (MAX_TIME if late else 0))
        outputs = _step(trainer, batch, following, position)
        finite = is_finite(outputs.get(trainer.record.loss, 0.0)) and trainer.skipped == skipped
        if finite or trainer.on_nonfinite == WARN:
            totals.add(outputs, size)
        stops = not finite and trainer.on_nonfinite == STOP
        if not finite and listener and not stops:
            listener.not_finite(trainer.step, trainer.numbers(outputs), trainer.skipped > skipped)
        skipped = trainer.skipped
        records += loader.batch
        if report is not None:
            report.step()
        step = trainer.step
        if saving is not None and not trainer.is_saving:
            _saved(saving, listener)
            saving = None
        at = now.epoch + (now.batch / loader.batches if loader.batches else 0)
        if _due(settings.log, step, ended, final):
            passed = time.perf_counter() - begun
            last = totals.take()
            progress = Progress(
                step,
                total,
                at,
                last,
                trainer.last_rate,
                records / passed,
                None if total is None else (total - step) * loader.batch * passed / records,
                now.batch * loader.batch if loader.batches is None else None,
                {} if report is None else report.numbers(passed),
            )
            if listener and not stops:
                listener.stepped(progress)
            begun, records = time.perf_counter(), 0
        better = over = False
        if evaluating and test is not None:
            averaged = trainer.averages if settings.ema is not None and settings.ema.evaluate else None
            with averaged.in_place() if averaged is not None else nullcontext():
                last = trainer.evaluate(test())
            if listener:
                listener.evaluated(step, at, last)
            better, over = judged.judge(trainer, last)
        if kept is not None and (trainer.stopping or better or over or _due(kept.every, step, ended, final)):
            meta = {**loader.saved(trainer.program.all_gather_text), **judged.meta()}
            trainer.finish_saving()
            _saved(saving, listener)
            saving = step, trainer.save(Path(kept.folder), meta, kept.keep.last, judged.best_step, kept.background)
            if not trainer.is_saving:
                _saved(saving, listener)
                saving = None
            begun, records = time.perf_counter(), 0
        if evaluating:
            begun, records = time.perf_counter(), 0
        if trainer.stopping or over:
            break
    trainer.finish_saving()
    _saved(saving, listener)
    trainer.check_last_loss()
    reason = trainer.stopping or (EARLY_STOP if over else 0)
    return Ended(last, 0 if final else reason)


def _saved(saving: tuple[int, Path] | None, listener: Listener | None) -> None:
    """Reports the checkpoint of a step, which is whole."""
    if saving is not None and listener:
        listener.saved(*saving)


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


def resume(trainer: Trainer, loader: Loader, path: Path, option: str = "") -> tuple[Mapping[str, JsonValue], str]:
    """Resumes from a checkpoint: tensors, the step's number, and the position in the data.

    What was saved beside them, and how the position is found, where that takes time.
    """
    meta = trainer.load(path, option)
    return meta, loader.restore(meta, trainer.step)


def _due(every: int | Literal["epoch"], step: int, ended: bool, final: bool) -> bool:
    """Whether an action with the interval `every` is due after a step; after the last step it always is."""
    return final or (ended if every == "epoch" else step % every == 0)
