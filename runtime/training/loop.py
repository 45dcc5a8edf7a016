"""Runs the training loop: it reads batches, takes steps, evaluates and saves checkpoints; the number of the step decides when.

Every rank runs the same loop; only rank 0 passes events to a `Listener`. Training ends with its last step or epoch, after a step in which
any rank had a reason to stop, or with an evaluation after which the patience of `early_stop` is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from partc.runtime.artifact.trace import CHECKPOINT, DATA, EVALUATION
from partc.runtime.artifact.training.train_settings import CheckpointSettings, LoopSettings
from pydantic import JsonValue

from ..data.loader import Loader
from ..data.sampler import Position
from ..errors import InputError, UsageError
from ..execution.times.recording import Recording
from .best import EARLY_STOP, Judged
from .finite import STOP, WARN, is_finite
from .progress import Listener, Meter, Metrics, Report
from .stopping import MAX_TIME
from .trainer import Trainer

Tested: TypeAlias = Callable[[], Iterable[tuple[Mapping[str, Any], int]]]
"""Returns the batches of an evaluation, each with its number of records."""


@dataclass(frozen=True)
class TrainingEnd:
    """The end of a training, on every rank.

    `metrics`: those of the last evaluation, else means over the last steps; on rank 0. `reason`: the reason to stop before the last step, 0
    where all steps were taken.
    """

    metrics: Metrics
    reason: int = 0


def run(
    trainer: Trainer,
    loader: Loader,
    settings: LoopSettings,
    listener: Listener | None = None,
    test: Tested | None = None,
    received: Callable[[], int] = lambda: 0,
    began: float | None = None,
    resumed: Mapping[str, JsonValue] | None = None,
    recording: Recording | None = None,
) -> TrainingEnd:
    """Trains as the settings say, or until any rank has `received` a reason to stop, or the settings' time since `began` is over.

    All ranks stop after the same step, evaluate if that is due, and save. `resumed` is the mapping that `resume` has returned. `recording`
    records steps, by the training's own count.
    """
    recording = recording or Recording.off(trainer.program)
    start = time.perf_counter() if began is None else began
    steps = _Steps(trainer, loader, settings, recording)
    judged = Judged(settings, trainer.record.loss, resumed or {})
    if trainer.program.any_rank(judged.is_over):
        return TrainingEnd({}, EARLY_STOP)
    after = _AfterStep(trainer, loader, settings, judged, listener, test, recording)
    is_last = False
    for step in steps:
        may_end = step.is_last or (after.evaluates(step) and settings.early_stop is not None)
        with recording.between(DATA, step.number):
            following, skipped = None if may_end else loader.peek(), trainer.skipped
        late = trainer.rank == 0 and settings.max_time is not None and time.perf_counter() - start > settings.max_time
        trainer.ask_to_stop(received() or (MAX_TIME if late else 0))
        if recording.asked():
            trainer.ask_to_trace()

        outputs = step.take(trainer, following)

        after.count(step, outputs, trainer.skipped > skipped)
        after.log(step, steps.total)
        after.evaluate(step)
        after.save(step)
        after.saves.copy(step)
        recording.after(step.number, trainer.tracing)
        is_last = step.is_last
        if trainer.stopping or after.is_over:
            break
    after.saves.finish()
    trainer.end_copies()
    trainer.check_last_loss()
    return TrainingEnd(after.metrics, 0 if is_last else trainer.stopping or (EARLY_STOP if after.is_over else 0))


@dataclass(frozen=True)
class _Step:
    """A step to be taken: its batch of `records` records on all ranks, its place in the data, and whether it ends an epoch or training."""

    number: int
    batch: Mapping[str, Any]
    records: int
    place: Position
    epoch: float
    """The epochs that are finished after the step, the last one as a fraction."""
    records_of_epoch: int | None
    """The records of the epoch so far, if the total number of records is not known."""
    ends_epoch: bool
    is_last: bool

    def is_due(self, every: int | Literal["epoch"]) -> bool:
        """Whether an action with the interval `every` is due after the step; after the last step every action is."""
        return self.is_last or (self.ends_epoch if every == "epoch" else self.number % every == 0)

    def take(self, trainer: Trainer, following: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Takes the step and returns its outputs; the error of a refused batch names its place in the data."""
        try:
            return trainer.advance(self.batch, following)
        except InputError as error:
            where = f"step {self.number}, batch {self.place.batch} of epoch {self.place.epoch}"
            raise InputError(f"{where}: {error}") from None


class _Steps:
    """The steps of a training from its current one to the last of `total`, or to the end of the last epoch if its length is not known."""

    def __init__(self, trainer: Trainer, loader: Loader, settings: LoopSettings, recording: Recording) -> None:
        if loader.batches == 0:
            fact = f"there are {loader.records} records, fewer than a batch of {loader.batch}"
            raise UsageError(f"{fact}\n  help: choose a smaller batch")
        self._trainer, self._loader, self._recording = trainer, loader, recording
        self.total = settings.total_steps(loader.batches)
        self._epochs = settings.epochs or 1

    def __iter__(self) -> Iterator[_Step]:
        loader, is_last = self._loader, self._is_over(self._trainer.step, self._loader.position())
        while not is_last:
            place, number = loader.position(), self._trainer.step + 1
            self._recording.before(number)
            with self._recording.between(DATA, number):
                batch = next(loader)
            now = loader.position()
            is_last = self._is_over(number, now)
            part = now.batch / loader.batches if loader.batches else 0
            counted = now.batch * loader.batch if loader.batches is None else None
            ends_epoch = now.epoch != place.epoch
            yield _Step(number, batch, loader.size, place, now.epoch + part, counted, ends_epoch, is_last)

    def _is_over(self, step: int, place: Position) -> bool:
        """Whether training is finished after `step` steps, at `place` in the data."""
        return place.epoch >= self._epochs if self.total is None else step >= self.total


class _AfterStep:
    """The work after a step, in this order: count it, log a line of progress, evaluate, save a checkpoint.

    `metrics`: those of the last evaluation or line of progress; `is_over`: whether the last evaluation ends the training.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: Loader,
        settings: LoopSettings,
        judged: Judged,
        listener: Listener | None,
        test: Tested | None,
        recording: Recording,
    ) -> None:
        self._trainer, self._settings, self._judged = trainer, settings, judged
        self._listener, self._test, self._recording = listener, test, recording
        self._meter = Meter(trainer, loader.batch, Report(trainer, settings.report) if settings.report else None)
        self._averages = trainer.averages if settings.ema is not None and settings.ema.evaluate else None
        self.saves = _Saves(trainer, loader, judged, listener)
        self._is_refused = self._is_best = self.is_over = False
        self.metrics = dict[str, float]()

    def evaluates(self, step: _Step) -> bool:
        """Whether an evaluation is due."""
        return self._test is not None and step.is_due(self._settings.evaluate)

    def count(self, step: _Step, outputs: Mapping[str, Any], is_skipped: bool) -> None:
        """Counts the step, and reports a non-finite loss to the listener unless that loss ends the training."""
        trainer = self._trainer
        finite = is_finite(outputs.get(trainer.record.loss, 0.0)) and not is_skipped
        self._is_refused = not finite and trainer.on_nonfinite == STOP  # `check_last_loss` raises it
        if not finite and self._listener and not self._is_refused:
            self._listener.not_finite(trainer.step, trainer.numbers(outputs), is_skipped)
        self._meter.count(outputs if finite or trainer.on_nonfinite == WARN else {}, step.records)
        self.saves.report()

    def log(self, step: _Step, total: int | None) -> None:
        """Logs a line of progress, if one is due."""
        if step.is_due(self._settings.log):
            progress = self._meter.take(total, step.epoch, step.records_of_epoch)
            self.metrics = dict(progress.metrics)
            if self._listener and not self._is_refused:
                self._listener.stepped(progress)

    def evaluate(self, step: _Step) -> None:
        """Evaluates, if an evaluation is due."""
        self._is_best = False
        if self._test is not None and self.evaluates(step):
            in_place = self._averages.in_place() if self._averages is not None else nullcontext()
            with self._recording.between(EVALUATION, step.number), in_place:
                self.metrics = self._trainer.evaluate(self._test())
            if self._listener:
                self._listener.evaluated(self._trainer.step, step.epoch, self.metrics)
            self._is_best, self.is_over = self._judged.judge(self._trainer, self.metrics)
            self._meter.restart()

    def save(self, step: _Step) -> None:
        """Saves a checkpoint, if one is due: by its interval, because the evaluation was the best, or because training ends."""
        kept = self._settings.checkpoint
        ends = self._trainer.stopping or self.is_over
        if kept is not None and (ends or self._is_best or step.is_due(kept.every)):
            with self._recording.between(CHECKPOINT, step.number):
                self.saves.save(kept)
            self._meter.restart()


class _Saves:
    """The checkpoints that a training writes; the listener learns of each when it is complete."""

    def __init__(self, trainer: Trainer, loader: Loader, judged: Judged, listener: Listener | None) -> None:
        self._trainer, self._loader, self._judged, self._listener = trainer, loader, judged, listener
        self._unreported: tuple[int, Path] | None = None

    def save(self, kept: CheckpointSettings) -> None:
        """Writes a checkpoint, or begins to do so if the plan saves in the background; collective."""
        meta = self._meta()
        self.finish()
        best = self._judged.best_step
        path = self._trainer.save(Path(kept.folder), meta, kept.keep.last, best, kept.background)
        self._unreported = self._trainer.step, path
        self.report()

    def copy(self, step: _Step) -> None:
        """Continues a copy in memory, and begins one if it is due; collective."""
        every = self._trainer.record.copies
        self._trainer.copy(every > 0 and step.number % every == 0 and not step.is_last, self._meta)

    def _meta(self) -> dict[str, JsonValue]:
        return {**self._loader.saved(self._trainer.program.all_gather_text), **self._judged.meta()}

    def report(self) -> None:
        """Reports the last checkpoint to the listener, if it is complete by now and not yet reported."""
        if self._unreported is not None and not self._trainer.is_saving:
            if self._listener:
                self._listener.saved(*self._unreported)
            self._unreported = None

    def finish(self) -> None:
        """Waits until the last checkpoint is complete, and reports it; collective."""
        self._trainer.finish_saving()
        self.report()


def resume(trainer: Trainer, loader: Loader, path: Path, option: str = "") -> tuple[Mapping[str, JsonValue], str]:
    """Resumes from a checkpoint: restores tensors, the step's number, and the position in the data.

    Returns the values that were saved in addition to the tensors, and a text that describes how the position is found, if that takes time.
    """
    meta = trainer.load(path, option)
    return meta, loader.restore(meta, trainer.step)
