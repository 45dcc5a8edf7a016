"""The job of one rank: a value that `partc run` passes to each rank as one argument of its command line.

Everything is in the argument and nothing in the environment: launchers pass arguments to other hosts, but not always environment
variables.
"""

from __future__ import annotations

import dataclasses
import json as text_of
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partc.runtime import Request

from partc.cli.server.settings import ServerSettings
from partc.runtime.artifact.trace import SUFFIX

BOARD = "board"
"""The file of the status board in a job's folder."""
PROGRESS = "progress"
"""The file in a job's folder in which rank 0 writes the progress of a training for the launching process."""


@dataclass(frozen=True)
class TrainingJob:
    """The command line of a training, or with `only_test` of an evaluation.

    `options`: keys of the plan's `train:` that the command's options override. Paths are absolute. Without `plan`, and unless
    `trust_code` is set, the artifact may name neither code nor files outside of its folder.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    resume: str | None = None
    init: str | None = None
    only: tuple[str, ...] = ()
    """Patterns of the weights that `init` gives; empty for all of them."""
    metrics: str | None = None
    tensorboard: str | None = None
    plan: str | None = None
    trust_code: bool = False
    only_test: bool = False
    only_train: bool = False
    """Whether no evaluation runs during the training."""
    averaged: bool = False
    """Whether an evaluation uses the moving averages of a checkpoint in place of its parameters."""
    restarts: int = 0
    """The most restarts without a new checkpoint; each begins `backoff` seconds after the loss of a rank."""
    backoff: float = 0.0
    copies: str | None = None
    """The folder in each host's memory for copies of the state, which outlive the ranks."""
    bar: bool = False
    """Whether the launching process has a terminal, and shows a progress bar there."""


@dataclass(frozen=True)
class InferenceJob:
    """The command line of an inference.

    `inputs` are texts `x.npz` or `name=file.npy`; `sizes` are the symbols' sizes for random inputs.
    """

    inputs: tuple[str, ...] = ()
    random: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    output: str | None = None
    repeat: int = 1


@dataclass(frozen=True)
class GenerationJob:
    """The command line of `partc generate`.

    The prompts are `texts`, `ids`, files of `features`, or a `file` of prompts; `decoder_ids` is the decoder's prompt of a model with an
    encoder. `output` is the file of the answers, if any. `options` apply to each `Request`. `requests` are the prompts' requests, where
    this process has read them; ranks that it starts get them from rank 0.
    """

    texts: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    features: tuple[str, ...] = ()
    decoder_ids: tuple[int, ...] = ()
    file: str | None = None
    tokenizer: str | None = None
    output: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    requests: Sequence[Request] | None = None


@dataclass(frozen=True)
class Reporting:
    """The reports of a run: a `quiet` one reports failures only, a `verbose` one more; with `json` rank 0 prints one document.

    `profile`: the file for the times of tasks; `steps`: the first and the last step in it, by default the last ones of the run.
    """

    quiet: bool = False
    verbose: bool = False
    json: bool = False
    profile: str | None = None
    steps: Sequence[int] = ()
    ops: bool = False
    """Whether the trace contains the ops inside of segments, by onnxruntime's own times."""

    @property
    def recorded(self) -> range | None:
        """The numbers of the steps in the profile; None for the last steps, whichever these are."""
        return range(self.steps[0], self.steps[-1] + 1) if self.steps else None

    @property
    def traces(self) -> bool:
        """Whether the profile is a trace of every action."""
        return self.profile is not None and self.profile.endswith(SUFFIX)


@dataclass(frozen=True)
class Job:
    """One run of an artifact: an inference unless it has a `training`, a `generation` or a `serving`; paths are absolute.

    `devices` maps each target to the device that it runs on. `run_dir` is the launching process's folder with the status board and the
    process ids, None where the user's own launcher started the ranks.
    """

    folder: str
    inference: InferenceJob = InferenceJob()
    training: TrainingJob | None = None
    generation: GenerationJob | None = None
    serving: ServerSettings | None = None
    threads: int | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    stall: float = 30.0
    trust: bool = False
    max_bytes: int | None = None
    run_dir: str | None = None
    reporting: Reporting = Reporting()

    def dumps(self) -> str:
        """Returns the job as one line of JSON, without the requests of a generation."""
        generation = None if self.generation is None else dataclasses.replace(self.generation, requests=None)
        return text_of.dumps(dataclasses.asdict(dataclasses.replace(self, generation=generation)))

    @staticmethod
    def loads(text: str) -> Job:
        """Returns the job that `dumps` wrote."""
        fields = text_of.loads(text)
        training, generation, inference = fields["training"], fields["generation"], fields["inference"]
        serving = fields["serving"]
        return Job(
            **{
                **fields,
                "inference": InferenceJob(**{**inference, "inputs": tuple(inference["inputs"])}),
                "reporting": Reporting(**fields["reporting"]),
                "training": None if training is None else TrainingJob(**training),
                "generation": None if generation is None else GenerationJob(**generation),
                "serving": None if serving is None else ServerSettings(**serving),
            }
        )
