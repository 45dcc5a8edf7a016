"""The command `partc train`: hands every rank its part of a training; where ranks come from is as for `partc run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import WithLauncherOptions, origin_options, place_options, start
from partc.cli.job.job import Job, TrainingJob


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option(
    "--data", multiple=True, metavar="PATH|INPUT=PATH", help="The records: a .npz, a folder, a .py, or a file by input."
)
@click.option("--test", multiple=True, metavar="PATH|INPUT=PATH", help="The records of evaluation, as --data.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Records a step, over all ranks.")
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="How often all records are used.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="How many steps, instead of epochs.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of the order of the records.")
@click.option("--log", metavar="N|epoch", help="A line of progress after so many steps, or after each epoch.")
@click.option(
    "--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Append all numbers to this file, as JSON lines."
)
@click.option("--evaluate", metavar="N|epoch", help="Evaluate after so many steps, or after each epoch.")
@click.option("--checkpoint", type=click.Path(file_okay=False, path_type=Path), help="The folder of the checkpoints.")
@click.option("--save", metavar="N|epoch", help="Write a checkpoint after so many steps, or after each epoch.")
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="How many checkpoints are kept.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[PATH]",
    help="Go on from a checkpoint; without a path from the newest whole one of --checkpoint.",
)
@click.option(
    "--init",
    type=click.Path(exists=True, path_type=Path),
    help="Begin with the weights of a .safetensors file or a checkpoint.",
)
@origin_options
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, resume: str | None, **given: Any) -> int:
    """Train the artifact in FOLDER (by default build) on its ranks.

    By itself an artifact may name no code, and no file or folder outside of it: data, test, checkpoint and schedule of its plan count
    with --plan.

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
    return start(ctx, folder, Job(folder=str(folder.absolute()), training=training), given)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
