"""The settings of a training: from the command line, else from the plan as the manifest has it; checked before ranks start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partc.cli.job.job import Job, TrainingJob
from partc.cli.job.origin import base_of, check_plan
from partc.cli.output import console
from partc.runtime.artifact.format import Manifest
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.runtime.artifact.lr_schedule import Rate
    from partc.runtime.data import Loader, Spec
    from partc.runtime.training.loop import RunConfig
    from partc.runtime.training.trainer import Trainer


DATA, TEST, SCHEDULE = "data", "test", "schedule"
"""What files of Python are for; each use has its globals for itself."""


def check(job: Job, manifest: Manifest) -> None:
    """Raises UsageError for settings that cannot work, before any rank is started."""
    options = job.training
    assert options is not None
    if manifest.training is None:
        raise UsageError(
            f"{job.folder}: the artifact has no training program\n  help: compile it with a plan that has `train:`"
        )
    if options.plan is not None:
        check_plan(Path(options.plan), Path(job.folder), manifest.training)
    settings = Settings(options, manifest, Path(job.folder))
    _ = settings.run_config
    check_source(settings)
    if options.only_test:
        if settings.test is None:
            raise UsageError("there is no data to evaluate on\n  help: use --data, or `test:` in the plan's `train:`")
        return
    if settings.data is None:
        raise UsageError("there is no data to train on\n  help: use --data, or `data:` in the plan's `train:`")
    check_batch(settings.batch, manifest)


def check_source(settings: Settings) -> None:
    """Raises UsageError where there is no checkpoint to resume from."""
    from partc.runtime.checkpoint.newest import candidates

    init = settings.options.init
    for source in (settings.resumed(), Path(init) if init else None):
        if source is not None and not source.is_file():
            next(candidates(source))


def check_batch(batch: int, manifest: Manifest) -> None:
    """Raises UsageError for a global batch size that the model's inputs cannot have."""
    from partc.runtime.artifact.legal_sizes import wrong_batch

    if problems := [*wrong_batch(batch, manifest)]:
        raise UsageError("\n".join(problems))


class Settings:
    """The settings: a command line option first, then the key of the plan."""

    def __init__(self, options: TrainingJob, manifest: Manifest, folder: Path) -> None:
        from partc.runtime.data.code import Code

        record = manifest.training
        assert record is not None
        self._code = {use: Code() for use in (DATA, TEST, SCHEDULE)}
        self.options, self.record = options, record
        self.base = base_of(options, folder, manifest)
        self.planned: dict[str, Any] = dict(record.settings)
        self._evaluation_loader: Loader | None = None

    def value(self, name: str, default: Any = None) -> Any:
        """One setting by its name."""
        said = getattr(self.options, name, None)
        return said if said is not None else self.planned.get(name, default)

    @property
    def batch(self) -> int:
        """The global batch size: the records of a step on all ranks together."""
        batch = self.value("batch")
        if batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        return int(batch)

    @property
    def rate(self) -> Rate:
        """The learning rate as a function of the step; an evaluation runs no code for it."""
        from partc.runtime.training.trainer import planned_rate

        return (
            (lambda step: 0.0)
            if self.options.only_test
            else planned_rate(self.record, self.base, self._code[SCHEDULE].module)
        )

    def run_code(self) -> None:
        """Runs the files of Python that this rank will ask for; what one raises is raised where it is asked for."""
        for use in (DATA, TEST):
            spec = self.data if use == DATA else self.test
            if spec is not None and not (self.options.only_test if use == DATA else self.options.only_train):
                source = [spec.source] if spec.source is not None and spec.source.suffix == ".py" else []
                self._prepare(use, [*source, Path(spec.transform.rpartition(":")[0])])
        if not self.options.only_test:
            function = str(self.record.schedule.get("function", ""))
            self._prepare(SCHEDULE, [self.base / function.rpartition(":")[0]])

    def _prepare(self, use: str, files: Sequence[Path]) -> None:
        for file in dict.fromkeys(file for file in files if file.is_file()):
            self._code[use].prepare(file)

    @property
    def data(self) -> Spec | None:
        """The records to train on."""
        return self._spec(self.options.data, "data")

    @property
    def test(self) -> Spec | None:
        """The records to evaluate on."""
        return self._spec(self.options.test, "test")

    def _spec(self, words: tuple[str, ...], name: str) -> Spec | None:
        from partc.runtime.data import Spec

        said = self.planned.get(name)
        planned = None if said is None else Spec.parse(said, self.base, f"train: {name}")
        found = Spec.of_words(words, Path(self.options.base), f"--{name}") if words else planned
        if found is None:
            return None
        others = [planned, self.data if name == "test" else None]
        values = {name: value for one in reversed(others) if one is not None for name, value in one.values.items()}
        return replace(found, values={**values, **found.values}, max_bytes=self.options.max_bytes)

    @property
    def run_config(self) -> RunConfig:
        """Length of the training, and when it logs, evaluates and saves."""
        from partc.runtime.training.loop import RunConfig

        planned = self.planned.get("checkpoint") or {}
        folder = self.options.checkpoint or (self.base / planned["folder"] if planned else None)
        steps, epochs = self.options.steps, self.options.epochs
        if steps is None and epochs is None:
            steps, epochs = self.planned.get("steps"), self.planned.get("epochs")
        return RunConfig(
            steps=steps,
            epochs=epochs,
            log=_every(self.options.log, self.planned.get("log", 10), "--log"),
            evaluate=_every(self.options.evaluate, self.planned.get("evaluate", "epoch"), "--evaluate"),
            checkpoint=None if folder is None else Path(folder),
            save=_every(self.options.save, planned.get("every", "epoch"), "--save"),
            keep=self.options.keep if self.options.keep is not None else planned.get("keep"),
        )

    def resumed(self) -> Path | None:
        """The checkpoint to resume from, or the folder of which the newest intact one is meant; None: training starts anew."""
        if self.options.resume is None:
            return None
        if self.options.resume == "":
            folder = self.run_config.checkpoint
            if folder is None:
                raise UsageError(
                    "--resume: the folder of the checkpoints is not known\n  help: use --resume PATH or --checkpoint DIR"
                )
            return folder
        return Path(self.options.resume)

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
            shuffle=self.planned.get("shuffle", True) and not self.planned.get("deal"),
            drop_last=self.planned.get("last", "drop") == "drop",
            interleave=self.planned.get("deal") or 1,
            fixed=self.record.fixed,
            code=self._code[DATA],
        )

    def batches(self, trainer: Trainer) -> Iterator[tuple[dict[str, Any], int]]:
        """One pass over the evaluation records: this rank's batches, each with its number of records on all ranks."""
        from partc.runtime.data import Position

        loader = self.evaluation_loader(trainer)
        loader.seek(Position())
        with loader:
            for number, batch in enumerate(loader):
                last = number == loader.order.batches - 1
                yield batch, loader.order.rest or self.batch if last else self.batch

    def evaluation_loader(self, trainer: Trainer) -> Loader:
        """The loader of the evaluation records, opened once; UsageError for records that do not fit the model."""
        self._evaluation_loader = self._evaluation_loader or self._open_test(trainer)
        return self._evaluation_loader

    def _open_test(self, trainer: Trainer) -> Loader:
        """A loader of all records; a smaller last batch that ranks cannot share is left out, with a message."""
        from partc.runtime.data import open_loader

        data = self.test
        assert data is not None
        opened = partial(
            open_loader,
            data,
            trainer.ports,
            trainer.rank,
            self.batch,
            shuffle=False,
            epochs=1,
            fixed=self.record.fixed,
            code=self._code[TEST],
        )
        try:
            return opened(drop_last=False)
        except UsageError:
            loader = opened(drop_last=True)
        rest = loader.order.places - loader.order.batches * self.batch
        if trainer.rank == 0:
            console.echo(
                f"the last {rest} of {loader.order.places:,} evaluation records are left out: the ranks cannot share so small a batch"
            )
        return loader


def _every(given: str | None, planned: Any, option: str) -> int | Literal["epoch"]:
    """An interval: a number of steps, or `epoch`."""
    said = planned if given is None else given
    if said == "epoch":
        return "epoch"
    if isinstance(said, int) or (isinstance(said, str) and said.isdecimal() and int(said) > 0):
        return int(said)
    raise UsageError(f"{option} is '{said}'\n  help: use a number of steps, or 'epoch'")
