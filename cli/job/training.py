"""What one rank of `partc train` and `partc eval` does: its trainer, its data, the loop, and on rank 0 the log."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from partc.cli.job.job import PROGRESS, Job
from partc.cli.job.outputs import hand_over
from partc.cli.job.profile import write_profile
from partc.cli.job.settings import Settings
from partc.cli.output import lookups
from partc.cli.output.progress import TrainingBar
from partc.cli.output.targets import counted, line, mpi_memory
from partc.cli.output.training_log import TrainingLog, Watch, watch_through_file
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.metric_formula import told

if TYPE_CHECKING:
    from partc.runtime.communication.transport import Transport
    from partc.runtime.training.trainer import Trainer


_PATIENCE = 5.0
"""Seconds that the other ranks of a process have to end after one has failed."""


def run_training(
    job: Job, transport: Transport | None, watch: Watch | None = None, settings: Settings | None = None
) -> int:
    """Trains, or evaluates, to the end; the exit code. `watch` shows the progress; `settings` may have run the user's files."""
    from partc.runtime.artifact.manifest import open_artifact
    from partc.runtime.training.loop import resume, run
    from partc.runtime.training.trainer import load_trainer

    options = job.training
    assert options is not None
    abort: Literal["raise", "abort"] = "abort" if transport is not None and job.run_dir is None else "raise"
    artifact = open_artifact(job.folder, trust=True)
    settings = settings or Settings(options, artifact.manifest, Path(job.folder))
    ahead = settings.resumed() or options.init
    with (
        load_trainer(
            job.folder,
            transport,
            rate=settings.rate,
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
            log = stack.enter_context(closing(TrainingLog(options.metrics, watch or _watch(job), job.quiet)))
        if options.init is not None:
            trainer.load_weights(options.init, option="--init")
        if options.only_test:
            return _evaluate(job, trainer, settings, log)
        loader = settings.loader(trainer)
        test = None if options.only_train else settings.test
        if test is not None:
            settings.evaluation_loader(trainer)
        with loader:
            path = settings.resumed()
            kept = settings.run_config.checkpoint
            if kept is not None:
                trainer.claim(kept)
                if log and path is None:
                    log.warn_of_other_run(kept)
            if path is not None:
                resume(trainer, loader, path, "--resume")
                if log and trainer.source:
                    log.resumed(trainer.step, trainer.source)
            if log:
                log.begins(trainer, loader, settings.run_config.total(loader.order.batches))
            profiler = trainer.program.record_times() if job.profile else None
            run(trainer, loader, settings.run_config, log, (lambda: settings.batches(trainer)) if test else None)
            if profiler is not None and job.profile:
                ranks = trainer.program.all_gather_text(profiler.text())
                if trainer.rank == 0:
                    write_profile(job.profile, ranks, job.quiet)
            counts = counted(trainer.program.all_gather_text(trainer.program.counts.text()))
            if log and counts:
                log.targets(line(counts, mpi_memory()))
            tables = lookups.looked_up(trainer.program.all_gather_text(lookups.told(trainer.program.looked_up)))
            if log and tables:
                log.looked_up(trainer.step, tables)
    return 0


def _watch(job: Job) -> Watch | None:
    """The progress file, where the launching process shows a bar."""
    assert job.training is not None
    return watch_through_file(Path(job.run_dir) / PROGRESS) if job.run_dir is not None and job.training.bar else None


def _evaluate(job: Job, trainer: Trainer, settings: Settings, log: TrainingLog | None) -> int:
    path = settings.resumed()
    if path is not None:
        trainer.load(path, "--checkpoint")
    metrics = trainer.evaluate(settings.batches(trainer))
    if log:
        log.evaluated(trainer.step, 0.0, metrics)
        if job.json:
            source = None if path is None else str(trainer.source)
            hand_over(job, {"step": trainer.step, "checkpoint": source, "metrics": told(metrics)})
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
    from partc.runtime.communication.in_process import LocalWorld
    from partc.runtime.execution.rank_threads import RankThreads

    if manifest.ranks == 1:
        return run_training(job, None, watch)
    assert job.training is not None
    world = LocalWorld(manifest.ranks, job.stall)
    every = [Settings(job.training, manifest, Path(job.folder)) for _ in range(world.size)]
    for settings in every:
        settings.run_code()  # before the threads: imports are no affair of several at once
    threads = RankThreads(world)
    jobs = [partial(run_training, job, world.transport(rank), watch, every[rank]) for rank in range(world.size)]
    try:
        return max(threads.run(jobs, _PATIENCE))
    finally:
        threads.close()
