"""The command `partc eval`: the loss and the metrics of a model, by the evaluation program of its artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from partc.cli.commands.run import (
    WithLauncherOptions,
    origin_options,
    place_options,
    profile_option,
    reporting_of,
    start,
)
from partc.cli.commands.train import data_option, only_option, setting, settings_of
from partc.cli.job.job import Job, TrainingJob
from partc.runtime.errors import UsageError


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@data_option("data", "Evaluation data; by default the plan's `test:`.")
@setting("batch", "N")
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, path_type=Path),
    help="A checkpoint, or a folder of checkpoints whose newest intact one is used.",
)
@click.option("--init", type=click.Path(exists=True, path_type=Path), help="Use the weights of a .safetensors file.")
@only_option
@click.option(
    "--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Append the metrics to this file as JSON lines."
)
@click.option("--ema", is_flag=True, help="Evaluate the moving averages of the checkpoint's parameters.")
@profile_option
@origin_options
@place_options
@click.pass_context
def command(ctx: click.Context, /, folder: Path, **chosen: Any) -> int:
    """Evaluate the artifact in FOLDER (by default build) with its initial weights, or with those of a checkpoint.

    \b
    partc eval --checkpoint runs/a --data test.npz --batch 500
    """

    def absolute(name: str) -> str | None:
        return None if chosen[name] is None else str(chosen[name].absolute())

    if chosen["ema"] and chosen["checkpoint"] is None:
        raise UsageError("--ema: the moving averages are those of a checkpoint\n  help: give --checkpoint, too")
    training = TrainingJob(
        options=settings_of({"test": chosen["data"], "batch": chosen["batch"]}),
        resume=absolute("checkpoint"),
        init=absolute("init"),
        only=chosen["only"],
        metrics=absolute("metrics"),
        plan=absolute("plan"),
        trust_code=chosen["trust_code"],
        only_test=True,
        averaged=chosen["ema"],
    )
    return start(
        ctx, folder, Job(folder=str(folder.absolute()), training=training, reporting=reporting_of(chosen)), chosen
    )
