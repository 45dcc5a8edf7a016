"""What one rank of `partc train` and `partc eval` does: its trainer, its data, the loop, and on rank 0 what the user is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partc.cli.job.job import Job, TrainingJob
from partc.cli.job.origin import base_of, check_plan
from partc.cli.output import say
from partc.cli.output.progress import TrainingBar
from partc.cli.output.report import Report, Watch, watched_through
from partc.runtime.artifact.format import Manifest
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.runtime.artifact.lr_schedule import Rate
    from partc.runtime.communication.transport import Transport
    from partc.runtime.data import Loader, Spec
    from partc.runtime.training.loop import RunConfig
    from partc.runtime.training.trainer import Trainer


TOLD = "told"
"""The file in a job's scratch folder through which rank 0 tells how far it is."""
_PATIENCE = 5.0
"""Seconds that the other ranks of a process have to end after one has failed."""


def run_training(job: Job, transport: Transport | None, watch: Watch | None = None) -> int:
    """Trains, or evaluates, to the end; the exit code. `watch` shows how far it is."""
    from partc.runtime.artifact.manifest import open_artifact
    from partc.runtime.training.loop import resume, run
    from partc.runtime.training.trainer import load_trainer

    told = job.training
    assert told is not None
    abort: Literal["raise", "abort"] = "abort" if transport is not None and job.scratch is None else "raise"
    artifact = open_artifact(job.folder, trust=True)
    settings = Settings(told, artifact.manifest, Path(job.folder))
    ahead = settings.resumed() or told.init
    with load_trainer(
        job.folder,
        transport,
        rate=settings.rate,
        ahead=ahead,
        threads=job.threads,
        trust=job.trust,
        stall=job.stall,
        on_error=abort,
    ) as trainer:
        artifact.refuse_replaced()
        report = Report(told.metrics, settings.unit, watch or _watch(job), job.quiet) if trainer.rank == 0 else None
        if told.init is not None:
            trainer.begin(told.init, option="--init")
        if told.only_test:
            return _evaluate(job, trainer, settings, report)
        loader = settings.loader(trainer)
        test = None if told.only_train else settings.test
        if test is not None:
            settings.measured(trainer)
        with loader:
            path = settings.resumed()
            kept = settings.course.checkpoint
            if kept is not None:
                trainer.claim(kept)
                if report and path is None:
                    report.begins_beside(kept)
            if path is not None:
                resume(trainer, loader, path, "--resume")
                if report and trainer.source:
                    report.resumed(trainer.step, trainer.source)
            if report:
                report.begins(trainer, loader, settings.course.total(loader.order.batches))
            run(trainer, loader, settings.course, report, (lambda: settings.batches(trainer)) if test else None)
        if report:
            report.close()
    return 0


def _watch(job: Job) -> Watch | None:
    """How the launching process is told, where it has a terminal."""
    assert job.training is not None
    return watched_through(Path(job.scratch) / TOLD) if job.scratch is not None and job.training.bar else None


def _evaluate(job: Job, trainer: Trainer, settings: Settings, report: Report | None) -> int:
    path = settings.resumed()
    if path is not None:
        trainer.load(path, "--checkpoint")
    metrics = trainer.evaluate(settings.batches(trainer))
    if report:
        report.evaluated(trainer.step, 0.0, metrics)
        report.close()
        if job.json:
            from partc.cli.job.rank import give

            numbers = {name: float(value) for name, value in metrics.items()}
            source = None if path is None else str(trainer.source)
            give(job, {"step": trainer.step, "checkpoint": source, "metrics": numbers})
    return 0


def run_threads(job: Job, manifest: Manifest) -> int:
    """All ranks as threads of this process."""
    bar = TrainingBar()
    watch = bar.told if sys.stderr.isatty() else None
    try:
        return _run_threads(job, manifest, watch)
    finally:
        bar.close()


def _run_threads(job: Job, manifest: Manifest, watch: Watch | None) -> int:
    from partc.runtime.communication.in_process import LocalWorld
    from partc.runtime.execution.rank_threads import RankThreads

    if manifest.ranks == 1:
        return run_training(job, None, watch)
    world = LocalWorld(manifest.ranks, job.stall)

    threads = RankThreads(world)
    jobs = [partial(run_training, job, world.transport(rank), watch) for rank in range(world.size)]
    try:
        return max(threads.run(jobs, _PATIENCE))
    finally:
        threads.close()


def check(job: Job, manifest: Manifest) -> None:
    """Raises UsageError for what is wrong before anything is started."""
    told = job.training
    assert told is not None
    if manifest.training is None:
        raise UsageError(
            f"{job.folder}: it was compiled to run, not to train\n  help: compile it by a plan with `train:`"
        )
    if told.plan is not None:
        check_plan(Path(told.plan), Path(job.folder), manifest.training)
    settings = Settings(told, manifest, Path(job.folder))
    _ = settings.course
    check_source(settings)
    if told.only_test:
        if settings.test is None:
            raise UsageError("there is nothing to evaluate on\n  help: give --data, or `test:` in the plan's `train:`")
        return
    if settings.data is None:
        raise UsageError("there are no data to train on\n  help: give --data, or `data:` in the plan's `train:`")
    check_batch(settings.batch, manifest)


def check_source(settings: Settings) -> None:
    """Raises UsageError where there is no checkpoint to go on from."""
    from partc.runtime.checkpoint.newest import candidates

    init = settings.told.init
    for source in (settings.resumed(), Path(init) if init else None):
        if source is not None and not source.is_file():
            next(candidates(source))


def check_batch(batch: int, manifest: Manifest) -> None:
    """Raises UsageError for a batch that the model's inputs do not take, before anything is started."""
    from partc.runtime.execution.symbol_bindings import is_legal, refusal

    assert manifest.training is not None
    parts = manifest.training.accumulate
    if batch % parts:
        raise UsageError(f"a batch of {batch} cannot be cut into {parts} parts\n  help: give a multiple of {parts}")
    size = batch // parts
    problems: dict[str, str] = {}
    own = {*manifest.training.fixed, *manifest.training.totals, *manifest.training.scalars}
    laws = {**manifest.symbols, **manifest.training.symbols}
    for port in (port for port in manifest.inputs if port.name not in own):
        dim = port.shape[0] if port.shape else ""
        law = laws.get(dim) if isinstance(dim, str) else None
        if law is not None and not is_legal(batch, law):
            problems.setdefault(str(dim), refusal(f"the batch, '{dim}' of input '{port.name}',", batch, str(dim), law))
        elif isinstance(dim, int) and dim != size:
            problems[port.name] = f"the batch is {size}, and input '{port.name}' was compiled for {dim}"
    if problems:
        raise UsageError("\n".join(problems.values()))


class Settings:
    """What the command line says, and where it says nothing the plan."""

    def __init__(self, told: TrainingJob, manifest: Manifest, folder: Path) -> None:
        record = manifest.training
        assert record is not None
        self.told, self.record = told, record
        self.base = base_of(told, folder, manifest)
        self.planned: dict[str, Any] = dict(record.settings)
        self._measured: Loader | None = None

    def value(self, name: str, default: Any = None) -> Any:
        """One setting."""
        said = getattr(self.told, name, None)
        return said if said is not None else self.planned.get(name, default)

    @property
    def batch(self) -> int:
        """The records of a step, over all ranks."""
        batch = self.value("batch")
        if batch is None:
            raise UsageError(
                "the size of a batch is not known\n  help: give --batch, or `batch:` in the plan's `train:`"
            )
        return int(batch)

    @property
    def rate(self) -> Rate:
        """The learning rate by step; where nothing is trained no code is run for it."""
        from partc.runtime.training.trainer import planned_rate

        return (lambda step: 0.0) if self.told.only_test else planned_rate(self.record, self.base)

    @property
    def unit(self) -> str:
        """What a record is called."""
        return "records"

    @property
    def data(self) -> Spec | None:
        """The records to train on."""
        return self._spec(self.told.data, "data")

    @property
    def test(self) -> Spec | None:
        """The records to evaluate on."""
        return self._spec(self.told.test, "test")

    def _spec(self, words: tuple[str, ...], name: str) -> Spec | None:
        from partc.runtime.data import Spec

        said = self.planned.get(name)
        planned = None if said is None else Spec.parse(said, self.base, f"train: {name}")
        found = Spec.of_words(words, Path(self.told.base), f"--{name}") if words else planned
        if found is None:
            return None
        others = [planned, self.data if name == "test" else None]
        values = {name: value for one in reversed(others) if one is not None for name, value in one.values.items()}
        return replace(found, values={**values, **found.values}, max_bytes=self.told.max_bytes)

    @property
    def course(self) -> RunConfig:
        """How far training goes."""
        from partc.runtime.training.loop import RunConfig

        planned = self.planned.get("checkpoint") or {}
        folder = self.told.checkpoint or (self.base / planned["folder"] if planned else None)
        steps, epochs = self.told.steps, self.told.epochs
        if steps is None and epochs is None:
            steps, epochs = self.planned.get("steps"), self.planned.get("epochs")
        return RunConfig(
            steps=steps,
            epochs=epochs,
            log=_every(self.told.log, self.planned.get("log", 10), "--log"),
            evaluate=_every(self.told.evaluate, self.planned.get("evaluate", "epoch"), "--evaluate"),
            checkpoint=None if folder is None else Path(folder),
            save=_every(self.told.save, planned.get("every", "epoch"), "--save"),
            keep=self.told.keep if self.told.keep is not None else planned.get("keep"),
        )

    def resumed(self) -> Path | None:
        """The checkpoint to go on from, or the folder whose newest whole one is meant."""
        if self.told.resume is None:
            return None
        if self.told.resume == "":
            folder = self.course.checkpoint
            if folder is None:
                raise UsageError(
                    "it is not known where the checkpoints are\n  help: give --resume PATH or --checkpoint DIR"
                )
            return folder
        return Path(self.told.resume)

    def loader(self, trainer: Trainer) -> Loader:
        """This rank's batches."""
        from partc.runtime.data import open_loader

        data = self.data
        assert data is not None
        return open_loader(
            data,
            trainer.ports,
            trainer.rank,
            self.batch,
            seed=self.value("seed", 0),
            shuffle=self.planned.get("shuffle", True) and "deal" not in self.planned,
            last=self.planned.get("last", "drop"),
            deal=self.planned.get("deal", 1),
            fixed=self.record.fixed,
        )

    def batches(self, trainer: Trainer) -> Iterator[tuple[dict[str, Any], int]]:
        """This rank's batches of one pass over the records of evaluation, with the records that each has on all ranks."""
        from partc.runtime.data import Position

        loader = self.measured(trainer)
        loader.seek(Position())
        with loader:
            for number, batch in enumerate(loader):
                last = number == loader.order.batches - 1
                yield batch, loader.order.rest or self.batch if last else self.batch

    def measured(self, trainer: Trainer) -> Loader:
        """The records of evaluation, opened once; UsageError, before any step where it is called then, for what is wrong with them."""
        self._measured = self._measured or self._open_test(trainer)
        return self._measured

    def _open_test(self, trainer: Trainer) -> Loader:
        """All records in batches; where ranks cannot share a smaller last one it is left out, which is said."""
        from partc.runtime.data import open_loader

        data = self.test
        assert data is not None
        opened = partial(
            open_loader, data, trainer.ports, trainer.rank, self.batch, shuffle=False, epochs=1, fixed=self.record.fixed
        )
        try:
            return opened(last="keep")
        except UsageError:
            loader = opened(last="drop")
        rest = loader.order.places - loader.order.batches * self.batch
        if trainer.rank == 0:
            say.echo(
                f"the last {rest} of {loader.order.places:,} records of evaluation make no batch that ranks can share"
            )
        return loader


def _every(told: str | None, planned: Any, option: str) -> int | Literal["epoch"]:
    """How often something happens: a number of steps, or each epoch."""
    said = planned if told is None else told
    if said == "epoch":
        return "epoch"
    if isinstance(said, int) or (isinstance(said, str) and said.isdecimal() and int(said) > 0):
        return int(said)
    raise UsageError(f"{option} is '{said}'\n  help: give a number of steps, or 'epoch'")
