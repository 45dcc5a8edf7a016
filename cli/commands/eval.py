"""The command `partc eval`: the loss and the metrics of a trained model over records, by the evaluation inside of its artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import WithLauncherOptions, origin_options, place_options, start
from partc.cli.job.job import Job, TrainingJob


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option("--data", multiple=True, metavar="PATH|INPUT=PATH", help="The records; by default the plan's `test:`.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Records a step, over all ranks.")
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, path_type=Path),
    help="A checkpoint, or the newest whole one of a folder of them.",
)
@click.option("--init", type=click.Path(exists=True, path_type=Path), help="The weights of a .safetensors file.")
@click.option(
    "--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Append the numbers to this file, as JSON lines."
)
@origin_options
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, **given: Any) -> int:
    """Measure the model of the artifact in FOLDER (by default build), as it is, or as a checkpoint has it.

    \b
    partc eval --checkpoint runs/a --data test.npz --batch 500
    """

    def absolute(name: str) -> str | None:
        return None if given[name] is None else str(given[name].absolute())

    training = TrainingJob(
        base=str(Path.cwd()),
        test=tuple(given["data"]),
        batch=given["batch"],
        resume=absolute("checkpoint"),
        init=absolute("init"),
        metrics=absolute("metrics"),
        plan=absolute("plan"),
        trust_code=given["trust_code"],
        only_test=True,
    )
    return start(ctx, folder, Job(folder=str(folder.absolute()), training=training), given)
