"""The command `partc train`: starts the ranks of a training, as `partc run` starts those of an inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import (
    WithLauncherOptions,
    origin_options,
    place_options,
    profile_options,
    reporting_of,
    start,
)
from partc.cli.commands.train_options import data_option, only_option, setting, settings_of
from partc.cli.job.job import Job, TrainingJob


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
