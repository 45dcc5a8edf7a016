"""What one rank has to do: a value that `partc run` passes to each rank as one argument of its command line.

Everything is in the argument and nothing in the environment, because launchers carry arguments to other hosts and not
always variables.
"""

from __future__ import annotations

import dataclasses
import json as text_of
from collections.abc import Mapping
from dataclasses import dataclass, field

BOARD = "board"
"""The status board's file in a job's folder."""
PROGRESS = "progress"
"""The file in a job's folder in which rank 0 leaves the progress of a training for the launching process."""


@dataclass(frozen=True)
class TrainingJob:
    """The command line of a training, or with `only_test` of an evaluation; None or empty: the plan decides.

    Paths are absolute but for those of `data` and `test`, which are relative to `base`. Without `plan`, and
    unless `trust_code`, the artifact may name neither code nor files outside of its folder.
    """

    base: str
    data: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    seed: int | None = None
    log: str | None = None
    evaluate: str | None = None
    checkpoint: str | None = None
    save: str | None = None
    keep: int | None = None
    resume: str | None = None
    init: str | None = None
    metrics: str | None = None
    max_bytes: int | None = None
    plan: str | None = None
    trust_code: bool = False
    only_test: bool = False
    only_train: bool = False
    """Whether nothing is evaluated in between."""
    bar: bool = False
    """Whether the launching process has a terminal, and shows a bar there."""


@dataclass(frozen=True)
class Job:
    """One run of an artifact; paths are absolute.

    `inputs` holds `x.npz` or `name=file.npy`; `sizes` the symbols' values for random inputs; `devices` by target the device that it is
    asked to be. `run_dir` is the launching process's folder with the status board and the process ids, None where the user's own launcher
    started the ranks. A `quiet` run prints failures only; with `json` rank 0 prints one document. `profile` is the file to which the
    times of tasks are written.
    """

    folder: str
    inputs: tuple[str, ...] = ()
    random: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    output: str | None = None
    repeat: int = 1
    threads: int | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    stall: float = 30.0
    trust: bool = False
    max_bytes: int | None = None
    run_dir: str | None = None
    quiet: bool = False
    json: bool = False
    training: TrainingJob | None = None
    profile: str | None = None

    def dumps(self) -> str:
        """The job as one line of JSON."""
        return text_of.dumps(dataclasses.asdict(self))

    @staticmethod
    def loads(text: str) -> Job:
        """The job that `dumps` wrote."""
        fields = text_of.loads(text)
        training = fields["training"]
        options = (
            None
            if training is None
            else TrainingJob(**{**training, "data": tuple(training["data"]), "test": tuple(training["test"])})
        )
        return Job(**{**fields, "inputs": tuple(fields["inputs"]), "training": options})
