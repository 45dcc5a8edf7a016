"""What one rank of `partc train` and `partc eval` does: its trainer, its data, the loop, and on rank 0 the log."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from partc.cli.job.job import PROGRESS, Job
from partc.cli.job.outputs import hand_over
from partc.cli.job.profile import measured, write_profile
from partc.cli.job.training_inputs import AUTO, TrainingInputs, saves
from partc.cli.job.weights_of import weights_of
from partc.cli.output import lookups
from partc.cli.output.progress import TrainingBar
from partc.cli.output.targets import counted, line, mpi_memory
from partc.cli.output.tensorboard import TensorBoard
from partc.cli.output.training_log import TrainingLog, Watch, watch_through_file
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.training.metric_formula import json_numbers
from partc.runtime.checkpoint.index import steps
from partc.runtime.errors import StoppedError
from partc.runtime.training.best import EARLY_STOP
from partc.runtime.training.stopping import StopSignals, reason_text

if TYPE_CHECKING:
    from partc.runtime.communication.transport import Transport
    from partc.runtime.training.loop import Listener
    from partc.runtime.training.trainer import Trainer


_PATIENCE = 5.0
"""Seconds that the other ranks of a process have to end after one has failed."""


def run_training(
    job: Job,
    transport: Transport | None,
    watch: Watch | None = None,
    inputs: TrainingInputs | None = None,
    signals: StopSignals | None = None,
) -> int:
    """Trains, or evaluates, to the end; the exit code. `watch` shows the progress; `inputs` may have run the user's files.

    StoppedError, once all is saved and released, where `signals` or `max_time` ended the training before its last step.
    """
    from partc.runtime.artifact.manifest import open_artifact
    from partc.runtime.training.callbacks import Listeners
    from partc.runtime.training.load import load_trainer
    from partc.runtime.training.loop import resume, run

    began = time.perf_counter()
    options = job.training
    assert options is not None
    abort: Literal["raise", "abort"] = "abort" if transport is not None and job.run_dir is None else "raise"
    artifact = open_artifact(job.folder, trust=True)
    inputs = inputs or TrainingInputs(job, artifact.manifest)
    settings, ahead = inputs.settings, inputs.resumed() or (None if options.only else options.init)
    with (
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
        ) as trainer,
        ExitStack() as stack,
    ):
        artifact.refuse_replaced()
        log = None
        if trainer.rank == 0:
            log = stack.enter_context(closing(TrainingLog(options.metrics, watch or _watch(job), job.reporting.quiet)))
        if options.init is not None:
            only = weights_of(options.only, inputs.weights, "the program") if options.only else None
            trainer.load_weights(options.init, option="--init", only=only)
        if options.only_test:
            return _evaluate(job, trainer, inputs, log)
        loader = inputs.loader(trainer)
        test = None if options.only_train else inputs.test
        if test is not None:
            inputs.evaluation_loader(trainer)
        with loader:
            path, meta = inputs.resumed(), None
            if settings.checkpoint is not None:
                kept = Path(settings.checkpoint.folder)
                trainer.claim(kept)
                if options.resume == AUTO and not trainer.program.any_rank(trainer.rank == 0 and bool(steps(kept))):
                    path = None
                if log and path is None:
                    log.warn_of_other_run(kept)
            if path is not None:
                meta, found = resume(trainer, loader, path, "--resume")
                if log and trainer.source:
                    log.resumed(trainer.step, trainer.source, found)
            listeners: list[Listener] = [] if log is None else [log]
            if log and options.tensorboard is not None:
                listeners.append(stack.enter_context(closing(TensorBoard(options.tensorboard))))
            if log and (callbacks := inputs.callbacks(job.stall)) is not None:
                listeners.append(callbacks)
            if log:
                log.begins(trainer, loader, settings)
            profiler = trainer.program.record_times() if job.reporting.profile else None
            test_batches = (lambda: inputs.batches(trainer)) if test else None
            received = (lambda: signals.received) if signals is not None else (lambda: 0)
            ended = run(
                trainer, loader, settings, Listeners(listeners) if log else None, test_batches, received, began, meta
            )
            if profiler is not None and job.reporting.profile:
                text = measured(profiler, job.reporting.profile, trainer.program)
                ranks = trainer.program.all_gather_text(text)
                if trainer.rank == 0:
                    write_profile(job.reporting.profile, ranks, job.reporting.quiet)
            counts = counted(trainer.program.all_gather_text(trainer.program.counts.text()))
            if log and counts:
                log.targets(line(counts, mpi_memory()))
            tables = lookups.looked_up(trainer.program.all_gather_text(lookups.counts_json(trainer.program.looked_up)))
            if log and tables:
                log.looked_up(trainer.step, tables)
        step = trainer.step
        if log and ended.reason == EARLY_STOP and settings.early_stop:
            log.stopped_early(step, settings.early_stop)
    if ended.reason and ended.reason != EARLY_STOP:
        saved = settings.checkpoint is not None
        kept_at = f"saved in {settings.checkpoint.folder}" if settings.checkpoint else "nothing was saved"
        help = "--resume auto goes on from there" if saved else "give --checkpoint DIR, so that it can go on"
        raise StoppedError(f"stopped by {reason_text(ended.reason)} after step {step}: {kept_at}\n  help: {help}")
    return 0


def _watch(job: Job) -> Watch | None:
    """The progress file, where the launching process shows a bar."""
    assert job.training is not None
    return watch_through_file(Path(job.run_dir) / PROGRESS) if job.run_dir is not None and job.training.bar else None


def _evaluate(job: Job, trainer: Trainer, inputs: TrainingInputs, log: TrainingLog | None) -> int:
    path = inputs.resumed()
    if path is not None:
        trainer.load(path, "--checkpoint", averaged=job.training is not None and job.training.averaged)
    metrics = trainer.evaluate(inputs.batches(trainer))
    if log:
        log.evaluated(trainer.step, 0.0, metrics)
        if job.reporting.json:
            source = None if path is None else str(trainer.source)
            hand_over(job, {"step": trainer.step, "checkpoint": source, "metrics": json_numbers(metrics)})
    return 0


def run_threads(job: Job, manifest: Manifest) -> int:
    """All ranks as threads of this process."""
    bar = TrainingBar()
    watch = bar.show if sys.stderr.isatty() else None
    try:
        return _run_threads(job, manifest, watch)
    finally:
        bar.close()


def _run_threads(job: Job, manifest: Manifest, watch: Watch | None) -> int:
    with signals_of(job, manifest) as signals:
        if manifest.ranks == 1:
            return run_training(job, None, watch, signals=signals)
        return _run_every(job, manifest, watch, signals)


def signals_of(job: Job, manifest: Manifest) -> AbstractContextManager[StopSignals | None]:
    """Notes the signals that ask to stop, where the training has a folder to save to; else they end it as any process."""
    return StopSignals() if saves(job, manifest) else nullcontext()


def _run_every(job: Job, manifest: Manifest, watch: Watch | None, signals: StopSignals | None) -> int:
    from partc.runtime.communication.in_process import LocalWorld
    from partc.runtime.execution.rank_threads import RankThreads

    assert job.training is not None
    world = LocalWorld(manifest.ranks, job.stall)
    every = [TrainingInputs(job, manifest) for _ in range(world.size)]
    for inputs in every:
        inputs.run_code()  # before the threads: imports are no affair of several at once
    threads = RankThreads(world)
    jobs = [
        partial(run_training, job, world.transport(rank), watch, every[rank], signals) for rank in range(world.size)
    ]
    try:
        return max(threads.run(jobs, _PATIENCE))
    finally:
        threads.close()
