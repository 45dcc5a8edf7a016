"""What the `training` section of a manifest names beside its programs: Python to run, files to read, a folder to write.

An artifact may be anybody's. So what its manifest names counts only where the user has said so: by the plan, by an option of the same
meaning, or by trusting the artifact. By itself a manifest may name files to read and a folder for checkpoints inside of its own
folder, and nothing to run.

    named(record, folder)    train: data: transform: for_lenet of /home/me/lenet/digits.py, which would run
                             train: checkpoint: /home/me/runs, which would be written
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError, Violation
from ..files.regular import lies_outside
from .data_spec import Spec
from .format import MANIFEST, Manifest, TrainingRecord

SCHEDULE, DATA, TEST, CHECKPOINT = "schedule", "data", "test", "checkpoint"
EVERY = (SCHEDULE, DATA, TEST, CHECKPOINT)
_FOLDER = "folder"
"""Beside the plan's own settings: where the plan lies, as it is seen from the artifact."""


@dataclass(frozen=True)
class Named:
    """One thing that a manifest names. `setting` is the key of `train:` that the command line can give instead.

    `function` is the name that is looked up in a Python file; empty: what is named is no code.
    """

    setting: str
    key: str
    path: Path
    function: str = ""

    def __str__(self) -> str:
        if self.function:
            return f"{self.key}: `{self.function}` of {self.path}, which would run"
        return f"{self.key}: {self.path}, which would be {'written' if self.setting == CHECKPOINT else 'read'}"

    def lies_in(self, folder: Path) -> bool:
        """Whether it is inside of a folder, links followed, and so are the files of data in it."""
        file, colon, _ = str(self.path).rpartition(":")
        path = Path(file) if colon and file.endswith(".npz") and not self.path.exists() else self.path
        inside = path.glob("*.npy") if self.setting != CHECKPOINT and path.is_dir() else ()
        return not any(lies_outside(one, folder) for one in (path, *inside))


def base_folder(folder: Path, record: TrainingRecord) -> Path:
    """Where the files are that a manifest names: where its plan was when it was compiled, else in the artifact itself."""
    told = record.settings.get(_FOLDER)
    return Path(os.path.normpath(folder / told)) if isinstance(told, str) else folder


def named(record: TrainingRecord, base: Path) -> list[Named]:
    """All that it names, relative paths in the folder `base`; UsageError where what it says of data says nothing."""
    found = list(_of_schedule(record, base))
    for setting in (DATA, TEST):
        if (said := record.settings.get(setting)) is not None:
            found += _of_data(Spec.parse(said, base, f"train: {setting}"), setting)
    kept = record.settings.get(CHECKPOINT)
    if isinstance(kept, dict) and isinstance(kept.get("folder"), str):
        found.append(Named(CHECKPOINT, "train: checkpoint", base / str(kept["folder"])))
    return found


def _of_schedule(record: TrainingRecord, base: Path) -> Iterator[Named]:
    reference = record.schedule.get("function")
    if record.schedule.get("type") == "python" and isinstance(reference, str):
        file, _, function = reference.rpartition(":")
        yield Named(SCHEDULE, "train: schedule", base / file, function)


def _of_data(spec: Spec, setting: str) -> Iterator[Named]:
    where = f"train: {setting}"
    if spec.source is not None:
        yield Named(setting, where, spec.source, "source" if spec.source.suffix == ".py" else "")
    yield from (Named(setting, f"{where}: {name}", path) for name, path in spec.files.items())
    if spec.transform:
        file, _, function = spec.transform.rpartition(":")
        yield Named(setting, f"{where}: transform", Path(file), function)


def outside(folder: Path, record: TrainingRecord, settings: Collection[str] = EVERY) -> list[Named]:
    """What a manifest may not have by itself, of these settings."""
    found = named(record, base_folder(folder, record))
    return [one for one in found if one.setting in settings and (one.function or not one.lies_in(folder))]


def refusal(folder: Path, manifest: Manifest, found: Sequence[Named], help: str) -> UsageError:
    """The error that lists what is not used; `help` says the ways to have it used."""
    head = f"{folder}: it names code, or files outside of its folder, which are used only where you say so"
    plan = f" {manifest.plan.name}" if manifest.plan is not None else ""
    return UsageError("\n".join([head, *(f"  {one}" for one in found), f"  help: {help.format(plan=plan)}"]))


def carried_code(folder: Path, manifest: Manifest) -> list[Violation]:
    """A violation for each Python file inside of the artifact that its manifest would have run: an artifact is data."""
    if manifest.training is None:
        return []
    try:
        found = named(manifest.training, base_folder(folder, manifest.training))
    except UsageError as error:
        return [Violation(MANIFEST, str(error), help="compile the model again")]
    return [
        Violation(MANIFEST, f"{one}: an artifact holds no code", help="compile the model again")
        for one in found
        if one.function and one.lies_in(folder)
    ]
