"""The loop around the steps: batches in, losses out, evaluation and checkpoints in between, all decided by the number of the step.

Every rank runs the same loop; its events go to a `Listener`, on rank 0 only. Training ends with its last step or epoch, after a step in
which some rank had a reason to stop, and with an evaluation that `early_stop` waits for no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from partc.runtime.artifact.trace import CHECKPOINT, DATA, EVALUATION
from partc.runtime.artifact.training.train_settings import CheckpointSettings, LoopSettings
from pydantic import JsonValue

from ..data.loader import Loader
from ..data.sampler import Position
from ..errors import InputError, UsageError
from ..execution.times.recording import Recording
from .best import EARLY_STOP, Judged
from .finite import STOP, WARN, is_finite
from .progress import Listener, Meter, Metrics
from .report import Report
from .stopping import MAX_TIME
from .trainer import Trainer


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
    recording: Recording | None = None,
) -> Ended:
    """Trains as the settings say, or until some rank has `received` a reason to stop, or the time is over that `began` then.

    All ranks stop after the same step, evaluate where that is due, and save. `resumed` is what `resume` returned.
    `recording`: of steps, as the training counts them.
    """
    recording = recording or Recording.off(trainer.program)
    start = time.perf_counter() if began is None else began
    steps = _Steps(trainer, loader, settings, recording)
    judged = Judged(settings, trainer.record.loss, resumed or {})
    if trainer.program.any_rank(judged.is_over):
        return Ended({}, EARLY_STOP)
    meter = Meter(trainer, loader.batch, Report(trainer, settings.report) if settings.report else None)
    saves, kept = _Saves(trainer, loader, judged, listener), settings.checkpoint
    averages = trainer.averages if settings.ema is not None and settings.ema.evaluate else None
    last, is_last, over = dict[str, float](), False, False
    for step in steps:
        evaluates = test is not None and step.is_due(settings.evaluate)
        may_end = step.is_last or (evaluates and settings.early_stop is not None)
        with recording.between(DATA, step.number):
            following, skipped = None if may_end else loader.peek(), trainer.skipped
        late = trainer.rank == 0 and settings.max_time is not None and time.perf_counter() - start > settings.max_time
        trainer.ask_to_stop(received() or (MAX_TIME if late else 0))
        if recording.asked():
            trainer.ask_to_trace()

        outputs = step.take(trainer, following)

        finite = is_finite(outputs.get(trainer.record.loss, 0.0)) and trainer.skipped == skipped
        refused = not finite and trainer.on_nonfinite == STOP  # `check_last_loss` raises it
        if not finite and listener and not refused:
            listener.not_finite(trainer.step, trainer.numbers(outputs), trainer.skipped > skipped)
        meter.count(outputs if finite or trainer.on_nonfinite == WARN else {}, step.records)
        saves.report()
        if step.is_due(settings.log):
            progress = meter.take(steps.total, step.epoch, step.records_of_epoch)
            last = dict(progress.metrics)
            if listener and not refused:
                listener.stepped(progress)
        better = False
        if evaluates and test is not None:
            in_place = averages.in_place() if averages is not None else nullcontext()
            with recording.between(EVALUATION, step.number), in_place:
                last = trainer.evaluate(test())
            if listener:
                listener.evaluated(trainer.step, step.epoch, last)
            better, over = judged.judge(trainer, last)
            meter.restart()
        if kept is not None and (trainer.stopping or better or over or step.is_due(kept.every)):
            with recording.between(CHECKPOINT, step.number):
                saves.save(kept)
            meter.restart()
        recording.after(step.number, trainer.tracing)
        is_last = step.is_last
        if trainer.stopping or over:
            break
    saves.finish()
    trainer.check_last_loss()
    return Ended(last, 0 if is_last else trainer.stopping or (EARLY_STOP if over else 0))


@dataclass(frozen=True)
class _Step:
    """A step that is to be taken: its batch of so many records of all ranks, where in the data that is, and what it ends."""

    number: int
    batch: Mapping[str, Any]
    records: int
    place: Position
    epoch: float
    """The epochs that are over with it, the last one in part."""
    records_of_epoch: int | None
    """The records of the epoch so far, where it is not known how many it has."""
    ends_epoch: bool
    is_last: bool

    def is_due(self, every: int | Literal["epoch"]) -> bool:
        """Whether what has the interval `every` is due after the step; after the last one all is."""
        return self.is_last or (self.ends_epoch if every == "epoch" else self.number % every == 0)

    def take(self, trainer: Trainer, following: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The outputs of the step; the error of a refused batch names its place in the data."""
        try:
            return trainer.advance(self.batch, following)
        except InputError as error:
            where = f"step {self.number}, batch {self.place.batch} of epoch {self.place.epoch}"
            raise InputError(f"{where}: {error}") from None


class _Steps:
    """The steps of a training from where it is, to the last of `total`, or of the last epoch where these have no known length."""

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
        """Whether all steps are taken after this one, at this place in the data."""
        return place.epoch >= self._epochs if self.total is None else step >= self.total


class _Saves:
    """The checkpoints that a training writes; the listener is told of each once it is whole."""

    def __init__(self, trainer: Trainer, loader: Loader, judged: Judged, listener: Listener | None) -> None:
        self._trainer, self._loader, self._judged, self._listener = trainer, loader, judged, listener
        self._unreported: tuple[int, Path] | None = None

    def save(self, kept: CheckpointSettings) -> None:
        """Writes a checkpoint, or begins to, where the plan has it done in the background; collective."""
        meta = {**self._loader.saved(self._trainer.program.all_gather_text), **self._judged.meta()}
        self.finish()
        best = self._judged.best_step
        path = self._trainer.save(Path(kept.folder), meta, kept.keep.last, best, kept.background)
        self._unreported = self._trainer.step, path
        self.report()

    def report(self) -> None:
        """Tells the listener of the last checkpoint, if it is whole by now."""
        if self._unreported is not None and not self._trainer.is_saving:
            if self._listener:
                self._listener.saved(*self._unreported)
            self._unreported = None

    def finish(self) -> None:
        """Waits until the last checkpoint is whole; collective."""
        self._trainer.finish_saving()
        self.report()


def resume(trainer: Trainer, loader: Loader, path: Path, option: str = "") -> tuple[Mapping[str, JsonValue], str]:
    """Resumes from a checkpoint: tensors, the step's number, and the position in the data.

    What was saved beside them, and how the position is found, where that takes time.
    """
    meta = trainer.load(path, option)
    return meta, loader.restore(meta, trainer.step)
