"""The resources that a manifest's `training` section names: Python code to run, files to read, a folder to write.

An artifact may come from anyone. So the resources that its manifest names are used only where the user has agreed: by the plan, by an
option of the same meaning, or by trusting the artifact. Without that, a manifest may only name files to read and a checkpoint folder,
all inside its own folder, and no code to run.

    named(record, folder)    train: data: transform: for_lenet of /home/me/lenet/digits.py, which would run
                             train: checkpoint: /home/me/runs, which would be written
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from partc.runtime.artifact.format import MANIFEST, Manifest, TrainingRecord
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.artifact.training.lr_schedule import Python
from partc.runtime.errors import UsageError, Violation
from partc.runtime.files.regular import is_outside

SCHEDULE, DATA, TEST, CALLBACKS, CHECKPOINT = "schedule", "data", "test", "callbacks", "checkpoint"
EVERY = (SCHEDULE, DATA, TEST, CALLBACKS, CHECKPOINT)


@dataclass(frozen=True)
class Named:
    """A resource that a manifest names. `setting` is the key of `train:` that the command line can give instead.

    `function` is the name that is looked up in a Python file; empty where no code is named.
    """

    setting: str
    key: str
    path: Path
    function: str = ""

    def __str__(self) -> str:
        if self.function:
            return f"{self.key}: `{self.function}` of {self.path}, which would run"
        return f"{self.key}: {self.path}, which would be {'written' if self.setting == CHECKPOINT else 'read'}"

    def is_inside(self, folder: Path) -> bool:
        """Whether the resource is inside a folder, links followed, and so are the .npy files in it, if it is a folder of data."""
        file, colon, _ = str(self.path).rpartition(":")
        path = Path(file) if colon and file.endswith(".npz") and not self.path.exists() else self.path
        inside = path.glob("*.npy") if self.setting != CHECKPOINT and path.is_dir() else ()
        return not any(is_outside(one, folder) for one in (path, *inside))


def base_folder(folder: Path, record: TrainingRecord) -> Path:
    """Returns the folder of the files that a manifest names: the folder of its plan when it was compiled, else the artifact itself."""
    return Path(os.path.normpath(folder / record.folder)) if record.folder else folder


def named(record: TrainingRecord, base: Path) -> list[Named]:
    """Returns all resources that a training record names; relative paths are in the folder `base`."""
    settings, resources = record.settings.seen_from(base), list[Named]()
    if isinstance(settings.schedule, Python):
        file, _, function = settings.schedule.function.rpartition(":")
        resources.append(Named(SCHEDULE, "train: schedule", base / file, function))
    for setting, data in ((DATA, settings.data), (TEST, settings.test)):
        resources += _of_data(Spec.of(data, f"train: {setting}"), setting) if data is not None else ()
    if settings.callbacks is not None:
        resources.append(
            Named(CALLBACKS, "train: callbacks", Path(settings.callbacks), "on_step, on_evaluate, on_save")
        )
    if settings.checkpoint is not None:
        resources.append(Named(CHECKPOINT, "train: checkpoint", Path(settings.checkpoint.folder)))
    return resources


def _of_data(spec: Spec, setting: str) -> Iterator[Named]:
    where = f"train: {setting}"
    if spec.source is not None:
        yield Named(setting, where, spec.source, "source" if spec.source.suffix == ".py" else "")
    yield from (Named(setting, f"{where}: {name}", path) for name, path in spec.files.items())
    if spec.transform:
        file, _, function = spec.transform.rpartition(":")
        yield Named(setting, f"{where}: transform", Path(file), function)


def outside(folder: Path, record: TrainingRecord, settings: Collection[str] = EVERY) -> list[Named]:
    """The resources of these settings that are code or are outside the artifact."""
    found = named(record, base_folder(folder, record))
    return [one for one in found if one.setting in settings and (one.function or not one.is_inside(folder))]


def refusal(folder: Path, manifest: Manifest, found: Sequence[Named], help: str) -> UsageError:
    """Returns the error that lists the resources that are not used; `help` states how to have them used."""
    head = f"{folder}: it names code, or files outside of its folder, which are used only where you say so"
    plan = f" {manifest.plan.name}" if manifest.plan is not None else ""
    return UsageError("\n".join([head, *(f"  {one}" for one in found), f"  help: {help.format(plan=plan)}"]))


def carried_code(folder: Path, manifest: Manifest) -> list[Violation]:
    """Returns a violation for each Python file inside the artifact that its manifest would have run: an artifact is data."""
    if manifest.training is None:
        return []
    found = named(manifest.training, base_folder(folder, manifest.training))
    return [
        Violation(MANIFEST, f"{one}: an artifact holds no code", help="compile the model again")
        for one in found
        if one.function and one.is_inside(folder)
    ]
