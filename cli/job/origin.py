"""Whether the settings of a training come from the user, by a plan or by options, or from an artifact alone.

With `partc train build --plan train.yaml` the plan is the user's. Its `train:` must agree with the manifest on data, schedule and
checkpoints, and their paths are relative to its folder. Without it, code and paths outside of the artifact are refused, all in one error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.cli.job.job import TrainingJob
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
from partc.runtime.errors import UsageError

if TYPE_CHECKING:
    from partc.runtime.artifact.format import Manifest, TrainingRecord

_OPTIONS = {DATA: "--data DATA", TEST: "--test DATA", CHECKPOINT: "--checkpoint DIR"}


def base_of(job: TrainingJob, folder: Path, manifest: Manifest) -> Path:
    """The folder to which paths of `train:` are relative; UsageError lists all code and paths that only the artifact names."""
    record = manifest.training
    assert record is not None
    if job.plan is not None:
        return Path(job.plan).parent
    if not job.trust_code and (found := outside(folder, record, _used(job))):
        options = {
            "--data DATA" if job.only_test else _OPTIONS[one.setting]: None for one in found if one.setting in _OPTIONS
        }
        given = f", or {', '.join(options)}" if options else ""
        mine = f"if the plan is yours, use --plan{{plan}}{given}"
        raise refusal(folder, manifest, found, f"{mine}; --trust-code allows all that the artifact names")
    return base_folder(folder, record)


def _used(job: TrainingJob) -> set[str]:
    """The settings that the command takes from the artifact."""
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
    """A setting in one form, however it is written."""
    return json.dumps(said, sort_keys=True) if said else "nothing"
