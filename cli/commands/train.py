"""The command `partc train`: starts the ranks of a training, as `partc run` starts those of an inference.

Options that are keys of a plan's `train:`: what they may be, and their help, are those of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from partc.cli.commands.run import (
    WithLauncherOptions,
    origin_options,
    place_options,
    profile_options,
    reporting_of,
    start,
)
from partc.cli.job.job import Job, TrainingJob
from partc.runtime.artifact.training.data_spec import data_of_words
from partc.runtime.artifact.training.train_settings import CheckpointSettings, LoopSettings
from partc.runtime.errors import UsageError
from partc.runtime.options import refusals
from pydantic import ValidationError

Command = TypeVar("Command", bound=Callable[..., Any])

_OF_CHECKPOINTS = {"checkpoint": "folder", "save": "every", "keep": "keep"}
"""By option the key of `checkpoint` that it gives."""


class _Key(click.ParamType[Any]):
    """The value of a key of `train:`, as a plan may have it."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None
        assert param.name is not None
        number = int(value) if isinstance(value, str) and value.removeprefix("-").isdecimal() else value
        try:
            LoopSettings.model_validate(settings_of({param.name: number}))
        except ValidationError as error:
            self.fail("; ".join(refused.fact for _, refused, _ in refusals(error)), param, ctx)
        return number


def setting(
    option: str, metavar: str, type: click.ParamType[Any] | None = None, help: str | None = None
) -> Callable[[Command], Command]:
    """The option `--batch` for the key `batch`."""
    model: Any = CheckpointSettings if option in _OF_CHECKPOINTS else LoopSettings
    help = help or model.model_fields[_OF_CHECKPOINTS.get(option, option)].description
    return click.option(f"--{option.replace('_', '-')}", type=type or _Key(), metavar=metavar, help=help)


def data_option(option: str, help: str) -> Callable[[Command], Command]:
    """The option `--data`, which says what the key `data` may say."""
    return click.option(f"--{option}", multiple=True, metavar="PATH|INPUT=PATH", help=help)


only_option = click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Take from --init the weights alone that a plan's pattern matches, such as '**.lora_*'; it may be repeated.",
)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `train:` that options give, paths made absolute; UsageError for words of `--data` that say nothing."""
    said: dict[str, Any] = {}
    for option, value in given.items():
        if value is None or value == ():
            continue
        if option in ("data", "test"):
            said[option] = data_of_words(value, Path.cwd(), f"--{option}").model_dump(mode="json")
        elif option in _OF_CHECKPOINTS:
            absolute = str(value.absolute()) if isinstance(value, Path) else value
            said.setdefault("checkpoint", {})[_OF_CHECKPOINTS[option]] = absolute
        elif option in LoopSettings.model_fields:
            said[option] = value
    return said


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@data_option("data", "Training data: a .npz, a folder, a .py, or one file per input.")
@data_option("test", "Evaluation data, like --data.")
@setting("batch", "N")
@setting("epochs", "N")
@setting("steps", "N")
@setting("seed", "N", help="Seed for shuffling.")
@setting("max_time", "TIME")
@setting("log", "N|epoch")
@click.option(
    "--metrics",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append all metrics to this file as JSON lines, or as CSV where its name ends in .csv.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write all metrics for TensorBoard into this folder.",
)
@profile_options
@setting("evaluate", "N|epoch")
@setting("checkpoint", "DIRECTORY", click.Path(file_okay=False, path_type=Path))
@setting("save", "N|epoch")
@setting("keep", "N")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[PATH|auto]",
    help="Resume from a checkpoint; without a path, from the newest intact one in --checkpoint; auto: from it or from the start.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    help="Start again from the newest checkpoint when a rank, its host or the launcher is lost, N times at most without a new one.",
)
@click.option(
    "--backoff", type=click.FloatRange(0), metavar="SECONDS", default=0.0, help="Wait so long before each restart."
)
@click.option(
    "--init",
    type=click.Path(exists=True, path_type=Path),
    help="Start with the weights of a .safetensors file or a checkpoint.",
)
@only_option
@origin_options
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, resume: str | None, **chosen: Any) -> int:
    """Train the artifact in FOLDER (by default build) on its ranks.

    SIGUSR2 writes the trace of --profile x.trace.json at once, of the last steps, while training goes on.

    Code, and paths outside of the artifact, that its plan names are used only with --plan, which shows that the plan is yours, or
    with --trust-code.

    \b
    partc train --plan train.yaml
    partc train --data digits.npz --batch 32 --epochs 10
    partc train build/ --checkpoint runs/a --resume
    mpiexec -n 5 partc train build/                     # under your own launcher
    """

    if chosen["backoff"] and not chosen["restarts"]:
        fact = "--backoff: nothing is started again without --restarts"
        raise UsageError(f"{fact}\n  help: give --restarts N, too, or leave out --backoff")
    training = TrainingJob(
        options=settings_of(chosen),
        resume=resume if resume in (None, "", "auto") else str(Path(resume).absolute()),
        init=_absolute(chosen["init"]),
        only=chosen["only"],
        metrics=_absolute(chosen["metrics"]),
        tensorboard=_absolute(chosen["tensorboard"]),
        plan=_absolute(chosen["plan"]),
        trust_code=chosen["trust_code"],
        restarts=chosen["restarts"],
        backoff=chosen["backoff"],
    )
    job = Job(folder=str(folder.absolute()), training=training, reporting=reporting_of(chosen))
    return start(ctx, folder, job, chosen)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
