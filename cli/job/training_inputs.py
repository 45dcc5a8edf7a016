"""The inputs of a training on one rank: its settings, from the plan and the command line, its learning rates, and its batches.

The settings come from the user, by a plan or by options, or from an artifact alone. With `partc train build --plan train.yaml` the plan is
the user's. Its `train:` must agree with the manifest on data, schedule and checkpoints, and their paths are relative to its folder. Without
it, code and paths outside of the artifact are refused, all in one error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.cli.job.job import Job, TrainingJob
from partc.cli.job.weights_of import weights_of
from partc.cli.output import console
from partc.runtime.artifact.format import Manifest, TrainingRecord
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.artifact.training.lr_schedule import Python, Rate
from partc.runtime.artifact.training.named import (
    CALLBACKS,
    CHECKPOINT,
    DATA,
    SCHEDULE,
    TEST,
    base_folder,
    outside,
    refusal,
)
from partc.runtime.artifact.training.train_settings import LoopSettings
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.runtime.data.loader import Loader
    from partc.runtime.training.callbacks import Callbacks
    from partc.runtime.training.trainer import Trainer


AUTO = "auto"
"""The value of `--resume` for the newest intact checkpoint, or the start where the folder has none."""


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
    inputs = TrainingInputs(job, manifest)
    check_source(inputs)
    if options.only_test:
        if inputs.test is None:
            raise UsageError("there is no data to evaluate on\n  help: use --data, or `test:` in the plan's `train:`")
        return
    if inputs.data is None:
        raise UsageError("there is no data to train on\n  help: use --data, or `data:` in the plan's `train:`")
    kept = inputs.settings.checkpoint
    judge = "early_stop" if inputs.settings.early_stop else "keep: best" if kept and kept.keep.best else ""
    if judge and inputs.test is None and not options.only_train:
        raise UsageError(
            f"{judge} judges evaluations, and there are none\n  help: use --test, or `test:` in the plan's `train:`"
        )
    if inputs.settings.batch is not None or not _is_code(inputs.data):
        check_batch(inputs.batch, manifest)


def _is_code(data: Spec) -> bool:
    """Whether the records come from a Python file, which may set the batch size itself."""
    return data.source is not None and data.source.suffix == ".py"


def check_source(inputs: TrainingInputs) -> None:
    """Raises UsageError where there is no checkpoint to resume from."""
    from partc.runtime.checkpoint.newest import candidates

    init, only = inputs.options.init, inputs.options.only
    if only and init is None:
        raise UsageError("--only: it says which weights --init gives\n  help: give --init, too, or remove --only")
    if only:
        weights_of(only, inputs.weights, "the program", "`partc inspect` lists them")
    resumed = None if inputs.options.resume == AUTO and inputs.resumed() else inputs.resumed()
    for source in (resumed, Path(init) if init else None):
        if source is not None and not source.is_file():
            next(candidates(source))


def check_batch(batch: int, manifest: Manifest) -> None:
    """Raises UsageError for a global batch size that the model's inputs cannot have."""
    from partc.runtime.artifact.legal_sizes import wrong_batch

    if problems := [*wrong_batch(batch, manifest)]:
        raise UsageError("\n".join(problems))


def saves(job: Job, manifest: Manifest) -> bool:
    """Whether a job trains and has a folder for checkpoints."""
    trains = manifest.training is not None and job.training is not None and not job.training.only_test
    return trains and TrainingInputs(job, manifest).settings.checkpoint is not None


class TrainingInputs:
    """The settings of a training, and the files that they name, opened by one rank; the command's options override the plan's settings."""

    def __init__(self, job: Job, manifest: Manifest) -> None:
        from partc.runtime.checkpoint.export import WEIGHTS
        from partc.runtime.data.code import Code

        record, options = manifest.training, job.training
        assert record is not None
        assert options is not None
        self._code = {use: Code() for use in (DATA, TEST, SCHEDULE, CALLBACKS)}
        self.options, self.record, self.max_bytes = options, record, job.max_bytes
        self.base = base_of(options, Path(job.folder), manifest)
        self.settings = record.settings.seen_from(self.base).merged(LoopSettings.model_validate(options.options))
        self.weights = [one.tensor for one in manifest.state if one.kind in WEIGHTS]
        self._evaluation_loader: Loader | None = None

    @property
    def batch(self) -> int:
        """The global batch size: the records of a step on all ranks together."""
        if self.settings.batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        return self.settings.batch

    @property
    def rate(self) -> Rate:
        """The learning rate as a function of the step; an evaluation runs no code for it."""
        from partc.runtime.training.load import planned_rate

        return (
            (lambda step: 0.0)
            if self.options.only_test
            else planned_rate(self.record, self.base, self._code[SCHEDULE].module)
        )

    def callbacks(self, stall: float) -> Callbacks | None:
        """Returns the functions of the user's file that rank 0 calls; None without one, or where the job only evaluates or only trains."""
        from partc.runtime.training.callbacks import Callbacks

        if self.settings.callbacks is None or self.options.only_test or self.options.only_train:
            return None
        file = Path(self.settings.callbacks)
        return Callbacks(self._code[CALLBACKS].module(file), str(file), stall)

    def run_code(self) -> None:
        """Runs the Python files that this rank will use; an error in one is raised later, where the file is used."""

        for use in (DATA, TEST):
            spec = self.data if use == DATA else self.test
            if spec is not None and not (self.options.only_test if use == DATA else self.options.only_train):
                source = [spec.source] if spec.source is not None and _is_code(spec) else []
                self._prepare(use, [*source, Path(spec.transform.rpartition(":")[0])])
        schedule = self.settings.schedule
        if not self.options.only_test and isinstance(schedule, Python):
            self._prepare(SCHEDULE, [self.base / schedule.function.rpartition(":")[0]])

    def _prepare(self, use: str, files: Sequence[Path]) -> None:
        for file in dict.fromkeys(file for file in files if file.is_file()):
            self._code[use].prepare(file)

    @property
    def data(self) -> Spec | None:
        """The records to train on."""
        return self._spec("data")

    @property
    def test(self) -> Spec | None:
        """The records to evaluate on; an input without a fixed value of its own has that of the training."""
        return self._spec("test")

    def _spec(self, name: str) -> Spec | None:

        found = getattr(self.settings, name)
        where = f"--{name}" if name in self.options.options else f"train: {name}"
        return None if found is None else Spec.of(found.with_values(self.settings.data), where, self.max_bytes)

    def resumed(self) -> Path | None:
        """Returns the checkpoint to resume from, or the folder whose newest intact one is meant; None where training starts anew."""
        if self.options.resume is None:
            return None
        if self.options.resume in ("", AUTO):
            if self.settings.checkpoint is None:
                raise UsageError(
                    "--resume: the folder of the checkpoints is not known\n  help: use --resume PATH or --checkpoint DIR"
                )
            return Path(self.settings.checkpoint.folder)
        return Path(self.options.resume)

    def loader(self, trainer: Trainer) -> Loader:
        """Opens the loader of this rank's batches."""
        from partc.runtime.data.loader import open_loader

        data, settings = self.data, self.settings
        assert data is not None
        return open_loader(
            data,
            trainer.ports,
            trainer.rank,
            settings.batch,
            seed=settings.seed,
            shuffle=settings.shuffle and settings.interleave is None,
            drop_last=settings.drop_last,
            interleave=settings.interleave or 1,
            fixed=self.record.fixed,
            code=self._code[DATA],
            largest=trainer.program.largest,
        )

    def batches(self, trainer: Trainer) -> Iterator[tuple[dict[str, Any], int]]:
        """Yields one pass over the evaluation records: this rank's batches, each with its number of records on all ranks."""
        from partc.runtime.data.sampler import Position

        loader = self.evaluation_loader(trainer)
        loader.seek(Position())
        with loader:
            for batch in loader:
                yield batch, loader.size

    def evaluation_loader(self, trainer: Trainer) -> Loader:
        """Returns the loader of the evaluation records, opened once. Raises UsageError for records that do not fit the model."""
        self._evaluation_loader = self._evaluation_loader or self._open_test(trainer)
        return self._evaluation_loader

    def _open_test(self, trainer: Trainer) -> Loader:
        """Opens a loader of all records; a smaller last batch that the ranks cannot share is left out, with a message."""
        from partc.runtime.data.loader import open_loader

        data = self.test
        assert data is not None
        opened = partial(
            open_loader,
            data,
            trainer.ports,
            trainer.rank,
            self.settings.batch,
            shuffle=False,
            epochs=1,
            fixed=self.record.fixed,
            code=self._code[TEST],
            largest=trainer.program.largest,
            lenient=True,
        )
        try:
            return opened(drop_last=False)
        except UsageError:
            loader = opened(drop_last=True)
        records = loader.records or 0
        rest = records - (loader.batches or 0) * loader.batch
        if trainer.rank == 0:
            console.echo(
                f"the last {rest} of {records:,} evaluation records are left out: the ranks cannot share so small a batch"
            )
        return loader


_OPTIONS = {DATA: "--data DATA", TEST: "--test DATA", CHECKPOINT: "--checkpoint DIR"}


def base_of(job: TrainingJob, folder: Path, manifest: Manifest) -> Path:
    """Returns the folder to which `train:`'s paths are relative. Raises UsageError with all code and paths that only the artifact names."""
    record = manifest.training
    assert record is not None
    if job.plan is not None:
        return Path(job.plan).parent
    if not job.trust_code and (outside_resources := outside(folder, record, _used(job))):
        options = {
            "--data DATA" if job.only_test else _OPTIONS[one.setting]: None
            for one in outside_resources
            if one.setting in _OPTIONS
        }
        given = f", or {', '.join(options)}" if options else ""
        mine = f"if the plan is yours, use --plan{{plan}}{given}"
        raise refusal(folder, manifest, outside_resources, f"{mine}; --trust-code allows all that the artifact names")
    return base_folder(folder, record)


def _used(job: TrainingJob) -> set[str]:
    """Returns the names of the settings that the command takes from the artifact."""
    if job.only_test:
        return {TEST} - job.options.keys()
    given = {*job.options} - ({CHECKPOINT} if "folder" not in job.options.get(CHECKPOINT, {}) else set())
    return {SCHEDULE, DATA, TEST, CALLBACKS, CHECKPOINT} - given - ({TEST} if job.only_train else set())


def check_plan(plan: Path, folder: Path, record: TrainingRecord) -> None:
    """Raises UsageError where the artifact and the plan differ, CompileError for an invalid plan."""
    from partc.compiler.plan.read import read_plan

    rules = read_plan(plan).train
    if rules is None:
        raise UsageError(f"{plan}: it has no `train:`\n  help: use the plan that {folder} was compiled from")
    mine, its = (one.model_dump(mode="json") for one in (rules.settings(), record.settings))
    problems = [
        f"{plan}: its `{name}` is {_text(mine.get(name))}, and {folder} was compiled with {_text(its.get(name))}"
        for name in (SCHEDULE, DATA, TEST, CALLBACKS, CHECKPOINT)
        if mine.get(name) != its.get(name)
    ]
    if problems:
        raise UsageError("\n".join([*problems, "  help: compile again, or use the plan that it was compiled from"]))


def _text(said: Any) -> str:
    """Returns a setting in one canonical form."""
    return json.dumps(said, sort_keys=True) if said else "nothing"
