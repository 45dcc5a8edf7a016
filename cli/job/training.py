"""The work of one rank of `partc train` and `partc eval`: its trainer, its data, the loop, and on rank 0 the log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partc.cli.interruption import refuse_stopped, takes_steps
from partc.cli.job.folders import MEMORY, locked, sweep
from partc.cli.job.job import PROGRESS, Job, TrainingJob
from partc.cli.job.outputs import hand_over
from partc.cli.job.profile import measured, op_times, report_not_reached, write_profile
from partc.cli.job.training_inputs import AUTO, TrainingInputs, saves
from partc.cli.job.weights_of import weights_of
from partc.cli.output import console, lookups
from partc.cli.output.progress import TrainingBar
from partc.cli.output.targets import counted, line, mpi_memory
from partc.cli.output.training_log import TensorBoard, TrainingLog, Watch, watch_through_file
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.training.metric_formula import json_numbers
from partc.runtime.checkpoint.index import steps
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.communication.transport import Transport
from partc.runtime.data.loader import Loader
from partc.runtime.errors import DamagedError, StoppedError
from partc.runtime.execution.times.profiler import Profiler
from partc.runtime.training.best import EARLY_STOP
from partc.runtime.training.stopping import NAMES, StopSignals, reason_text
from partc.runtime.training.trainer import Trainer
from pydantic import JsonValue

if TYPE_CHECKING:
    from partc.runtime.execution.times.recording import Recording
    from partc.runtime.training.progress import Listener


_PATIENCE = 5.0
"""The seconds in which the other ranks of a process must end after one has failed."""


def run_training(
    job: Job,
    transport: Transport | None,
    watch: Watch | None = None,
    inputs: TrainingInputs | None = None,
    signals: StopSignals | None = None,
) -> int:
    """Trains, or evaluates, to the end; returns the exit code. `watch` shows the progress; `inputs` may have run the user's files already.

    Raises StoppedError, after everything is saved and released, where `signals` or `max_time` ended the training before its last step.
    """
    from partc.runtime.training.load import load_trainer
    from partc.runtime.training.loop import run

    began = time.perf_counter()
    options = job.training
    assert options is not None
    abort: Literal["raise", "abort"] = "abort" if transport is not None and job.run_dir is None else "raise"
    artifact = open_artifact(job.folder, trust=True)
    inputs = inputs or TrainingInputs(job, artifact.manifest)
    ahead = inputs.resumed() or (None if options.only else options.init)
    with (
        op_times(job) as folder,
        load_trainer(
            job.folder,
            transport,
            rate=inputs.rate,
            ahead=ahead,
            threads=job.threads,
            devices=job.devices,
            trust=job.trust,
            stall=job.stall,
            on_error=abort,
            op_times=folder,
        ) as trainer,
        ExitStack() as stack,
    ):
        artifact.refuse_replaced()
        log = None
        if trainer.rank == 0:
            if watch is None and job.run_dir is not None and options.bar:
                watch = watch_through_file(Path(job.run_dir) / PROGRESS)
            log = stack.enter_context(closing(TrainingLog(options.metrics, watch, job.reporting.quiet)))
        training = _Training(job, options, inputs, trainer, log)
        if options.init is not None:
            only = weights_of(options.only, inputs.weights, "the program") if options.only else None
            trainer.load_weights(options.init, option="--init", only=only)
        if options.only_test:
            training.evaluate()
            return 0
        with inputs.loader(trainer) as loader:
            test = training.test_batches()
            resumed = training.begin(loader)
            listeners = training.listeners(loader, stack)
            recording = training.recording(signals)
            received = (lambda: signals.received) if signals is not None else (lambda: 0)
            takes_steps(lambda: trainer.step)
            ended = run(trainer, loader, inputs.settings, listeners, test, received, began, resumed, recording)
            takes_steps(lambda: 0)
            training.report_counts(recording)
        training.report_end(ended.reason)
    training.refuse_stopped(ended.reason)
    return 0


@dataclass(frozen=True)
class _Training:
    """A training, or an evaluation, on one rank: the work before its first step and after its last one."""

    job: Job
    options: TrainingJob
    inputs: TrainingInputs
    trainer: Trainer
    log: TrainingLog | None
    """The log on rank 0, None on other ranks."""
    locks: list[int | None] = field(default_factory=list)
    """Handles of locked folders, which the system releases when the rank ends."""

    def evaluate(self) -> None:
        """Evaluates the requested checkpoint; the metrics go to the log and, with --json, to the command."""
        path, trainer = self.inputs.resumed(), self.trainer
        if path is not None:
            trainer.load(path, "--checkpoint", averaged=self.options.averaged)
        profiler = trainer.record_evaluation() if self.job.reporting.profile else None
        metrics = trainer.evaluate(self.inputs.batches(trainer))
        if profiler is not None:
            self._write(profiler)
        if self.log:
            self.log.evaluated(trainer.step, 0.0, metrics)
            if self.job.reporting.json:
                source = None if path is None else str(trainer.source)
                hand_over(self.job, {"step": trainer.step, "checkpoint": source, "metrics": json_numbers(metrics)})

    def test_batches(self) -> Callable[[], Iterator[tuple[dict[str, Any], int]]] | None:
        """Checks that an evaluation's records fit the model, and returns a function that gives its batches; None where there are none."""
        if self.options.only_train or self.inputs.test is None:
            return None
        self.inputs.evaluation_loader(self.trainer)
        return lambda: self.inputs.batches(self.trainer)

    def begin(self, loader: Loader) -> Mapping[str, JsonValue] | None:
        """Claims the folder of the checkpoints, and resumes where that is requested; returns the metadata saved with the tensors."""
        from partc.runtime.training.loop import resume

        path, trainer, checkpoint = self.inputs.resumed(), self.trainer, self.inputs.settings.checkpoint
        if checkpoint is not None:
            kept = Path(checkpoint.folder)
            trainer.claim(kept)
            if self.options.resume == AUTO and not trainer.program.any_rank(trainer.rank == 0 and bool(steps(kept))):
                path = None
            if self.log and path is None:
                self.log.warn_of_other_run(kept)
        if self.options.copies is not None and (meta := self._continued(loader, Path(self.options.copies))) is not None:
            return meta
        if path is None:
            return None
        meta, place = resume(trainer, loader, path, "--resume")
        if self.log and trainer.source:
            self.log.resumed(trainer.step, trainer.source, place)
        return meta

    def _continued(self, loader: Loader, folder: Path) -> Mapping[str, JsonValue] | None:
        """Prepares copies of the state in memory, and continues from the newest whole one; None where the disk has a later step."""
        from partc.runtime.training.loop import resume

        trainer, checkpoint = self.trainer, self.inputs.settings.checkpoint
        copies = trainer.keep_copies(folder)
        if copies.is_first:
            self.locks.append(locked(folder))  # where the launcher is on another host
            sweep(MEMORY)
        if self.log and len(copies.hosts) == 1:
            console.echo(
                "warning: all ranks are on one host: copies of the state outlive them, but not the host", err=True
            )
        saved = steps(Path(checkpoint.folder)) if checkpoint is not None and trainer.rank == 0 else []
        place = copies.newest(trainer.program.largest(saved[-1][0] if saved else 0))
        if place is None:
            return None
        try:
            meta, _ = resume(trainer, loader, place)
        except DamagedError as error:
            if self.log:
                console.echo(f"warning: a copy of the state is damaged, and skipped: {error.problems[0]}", err=True)
            return None
        if self.log:
            self.log.resumed(trainer.step, place)
        return meta

    def listeners(self, loader: Loader, stack: ExitStack) -> Listener | None:
        """Returns the listeners to the progress, on rank 0: the log, which begins here, TensorBoard, and the user's functions."""
        from partc.runtime.training.callbacks import Listeners

        if self.log is None:
            return None
        listeners: list[Listener] = [self.log]
        if self.options.tensorboard is not None:
            listeners.append(stack.enter_context(closing(TensorBoard(self.options.tensorboard))))
        if (callbacks := self.inputs.callbacks(self.job.stall)) is not None:
            listeners.append(callbacks)
        self.log.begins(self.trainer, loader, self.inputs.settings)
        return Listeners(listeners)

    def recording(self, signals: StopSignals | None) -> Recording:
        """Returns the recorder of the profile's steps; rank 0 receives requests for a trace, and notifies the other ranks."""
        from partc.runtime.execution.times.recording import Recording

        program, reporting = self.trainer.program, self.job.reporting
        if reporting.profile is None:
            return Recording.off(program)
        if signals is None or self.log is None:
            return Recording(program, self._write, reporting.recorded)
        return Recording(program, self._write, reporting.recorded, signals.takes_trace)

    def _write(self, profiler: Profiler) -> None:
        """Writes the profile or the trace; collective."""
        program, reporting = self.trainer.program, self.job.reporting
        assert reporting.profile is not None
        ranks = program.all_gather_text(measured(profiler, reporting.profile, program))
        if self.log:
            write_profile(reporting.profile, ranks, reporting.quiet)

    def report_counts(self, recording: Recording) -> None:
        """Writes the profile, and logs the targets' counts and the lookups in tables; collective."""
        program, reporting = self.trainer.program, self.job.reporting
        recording.end()
        if self.log and reporting.profile and not recording.has_begun:
            report_not_reached(reporting, self.trainer.step)
        counts = counted(program.all_gather_text(program.counts.text()))
        if self.log and counts:
            self.log.targets(line(counts, mpi_memory()))
        tables = lookups.looked_up(program.all_gather_text(lookups.counts_json(program.looked_up)))
        if self.log and tables:
            self.log.looked_up(self.trainer.step, tables)

    def report_end(self, reason: int) -> None:
        """Logs that training ended before its last step, where the reason is the plan's `early_stop`."""
        early_stop = self.inputs.settings.early_stop
        if self.log and reason == EARLY_STOP and early_stop:
            self.log.stopped_early(self.trainer.step, early_stop)

    def refuse_stopped(self, reason: int) -> None:
        """Raises StoppedError where a signal or `max_time` ended the training before its last step."""
        if reason in (0, EARLY_STOP):
            return
        checkpoint = self.inputs.settings.checkpoint
        kept_at = f"saved in {checkpoint.folder}" if checkpoint else "nothing was saved"
        help = "--resume auto goes on from there" if checkpoint else "give --checkpoint DIR, so that it can go on"
        when = f"after step {self.trainer.step}"
        raise StoppedError(f"stopped by {reason_text(reason)} {when}: {kept_at}\n  help: {help}")


def run_threads(job: Job, manifest: Manifest) -> int:
    """Runs all ranks as threads of this process; returns the exit code."""
    refuse_stopped()
    bar = TrainingBar()
    watch = bar.show if sys.stderr.isatty() else None
    try:
        with signals_of(job, manifest) as signals:
            if manifest.ranks == 1:
                return run_training(job, None, watch, signals=signals)
            return _run_every(job, manifest, watch, signals)
    finally:
        bar.close()


def signals_of(job: Job, manifest: Manifest) -> AbstractContextManager[StopSignals | None]:
    """A context that records the signals that ask to stop, where the training has a folder to save to, and with a trace its signal.

    Any other signal ends the training as it ends any process.
    """
    names = NAMES if saves(job, manifest) else ()
    return StopSignals(names, job.reporting.traces) if names or job.reporting.traces else nullcontext()


def _run_every(job: Job, manifest: Manifest, watch: Watch | None, signals: StopSignals | None) -> int:
    from partc.runtime.execution.rank_threads import RankThreads

    assert job.training is not None
    world = LocalWorld(manifest.ranks, job.stall)
    every = [TrainingInputs(job, manifest) for _ in range(world.size)]
    for inputs in every:
        inputs.run_code()  # before the threads start: imports must not run at the same time
    threads = RankThreads(world)
    jobs = [
        partial(run_training, job, world.transport(rank), watch, every[rank], signals) for rank in range(world.size)
    ]
    try:
        return max(threads.run(jobs, _PATIENCE))
    finally:
        threads.close()
