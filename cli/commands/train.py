"""The command `partc train`: starts the ranks of a training, as `partc run` starts those of an inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import WithLauncherOptions, origin_options, place_options, start
from partc.cli.job.job import Job, TrainingJob


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option(
    "--data",
    multiple=True,
    metavar="PATH|INPUT=PATH",
    help="Training data: a .npz, a folder, a .py, or one file per input.",
)
@click.option("--test", multiple=True, metavar="PATH|INPUT=PATH", help="Evaluation data, like --data.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Global batch size.")
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Number of passes over the data.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Number of steps, instead of epochs.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed for shuffling.")
@click.option("--log", metavar="N|epoch", help="Print progress every N steps, or after each epoch.")
@click.option(
    "--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Append all metrics to this file as JSON lines."
)
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the times of tasks by rank to this JSON file.",
)
@click.option("--evaluate", metavar="N|epoch", help="Evaluate every N steps, or after each epoch.")
@click.option("--checkpoint", type=click.Path(file_okay=False, path_type=Path), help="Folder for checkpoints.")
@click.option("--save", metavar="N|epoch", help="Write a checkpoint every N steps, or after each epoch.")
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Number of checkpoints to keep.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[PATH]",
    help="Resume from a checkpoint; without a path, from the newest intact one in --checkpoint.",
)
@click.option(
    "--init",
    type=click.Path(exists=True, path_type=Path),
    help="Start with the weights of a .safetensors file or a checkpoint.",
)
@origin_options
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, resume: str | None, **given: Any) -> int:
    """Train the artifact in FOLDER (by default build) on its ranks.

    Code, and paths outside of the artifact, that its plan names are used only with --plan, which shows that the plan is yours, or
    with --trust-code.

    \b
    partc train --plan train.yaml
    partc train --data digits.npz --batch 32 --epochs 10
    partc train build/ --checkpoint runs/a --resume
    mpiexec -n 5 partc train build/                     # under your own launcher
    """
    training = TrainingJob(
        base=str(Path.cwd()),
        data=tuple(given["data"]),
        test=tuple(given["test"]),
        batch=given["batch"],
        epochs=given["epochs"],
        steps=given["steps"],
        seed=given["seed"],
        log=given["log"],
        evaluate=given["evaluate"],
        checkpoint=_absolute(given["checkpoint"]),
        save=given["save"],
        keep=given["keep"],
        resume=resume if not resume else str(Path(resume).absolute()),
        init=_absolute(given["init"]),
        metrics=_absolute(given["metrics"]),
        plan=_absolute(given["plan"]),
        trust_code=given["trust_code"],
    )
    job = Job(folder=str(folder.absolute()), training=training, profile=_absolute(given["profile"]))
    return start(ctx, folder, job, given)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
