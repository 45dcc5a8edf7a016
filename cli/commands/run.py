"""The command `partc run`: decides how the ranks are started, and gives each of them its job.

Under a launcher of the user's own this process is one of the ranks. An artifact of one rank, or a run with `--in-process`, needs no
other process. Else a launcher is started here.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from partc.cli.job.job import InferenceJob, Job, Reporting
from partc.cli.launch.launcher import Hosts
from partc.cli.output import console
from partc.runtime.errors import PartcError, UsageError
from partc.runtime.files.regular import fault
from partc.runtime.job.place import Place, inherited_variables, is_launched, refuse_inherited, surrounding_job
from partc.runtime.units import parse_bytes

_LAUNCHER_OPTIONS = "launcher_options"
Command = TypeVar("Command", bound=Callable[..., Any])


def byte_count(text: str) -> int:
    """The number of bytes of a text such as 8GB, 512MiB, 1.5G or 1000000; click.BadParameter for other texts."""
    found = parse_bytes(text)
    if found is None:
        raise click.BadParameter(f"'{text}' is not a size such as 8GB, 512MiB or 1000000")
    return found


max_bytes = click.option(
    "--max-bytes",
    callback=lambda ctx, parameter, text: None if text is None else byte_count(text),
    metavar="SIZE",
    help="Memory limit of a rank for compressed or random data, such as 8GB; by default half of the machine's.",
)


def parse_device(ctx: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """The `--device` options as a mapping of targets to devices."""
    from partc.runtime.devices.devices import parse_devices

    try:
        return parse_devices(texts)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


device_option = click.option(
    "--device",
    "devices",
    multiple=True,
    callback=parse_device,
    metavar="DEVICE|TARGET=DEVICE",
    help="cuda, or cuda:1 for the second GPU: where ops run that the plan gives no target; cuda=cpu: run the target cuda on the CPU.",
)
_PLACE_OPTIONS = (
    click.option(
        "-n",
        "ranks",
        type=click.IntRange(min=1),
        metavar="N",
        help="Number of ranks; must be the artifact's. Of an elastic one by default the most that the hosts' slots allow.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="Threads per rank; by default the cores are divided among the ranks.",
    ),
    device_option,
    click.option(
        "--stall", type=float, default=30.0, show_default=True, metavar="SECONDS", help="Report waits longer than this."
    ),
    max_bytes,
    click.option("--trust", is_flag=True, help="Skip the hashes of the artifact's files."),
    click.option("--in-process", is_flag=True, help="Run all ranks as threads of this process, without MPI."),
    click.option("--hostfile", type=click.Path(exists=True, dir_okay=False), help="Host file for the launcher."),
    click.option("--host", "hosts", metavar="A,B", help="Host list for the launcher."),
)


_ORIGIN_OPTIONS = (
    click.option(
        "--plan",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The plan that the artifact was compiled from; allows the code and paths that it names.",
    ),
    click.option(
        "--trust-code",
        is_flag=True,
        help="Allow the code and paths that the artifact itself names.",
    ),
)


def parse_steps(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    """The first and the last step of `--trace-steps FIRST:LAST`; nothing where it is not given."""
    from partc.runtime.execution.times.profiler import KEPT

    if text is None:
        return ()
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) >= 1):
        raise click.BadParameter(f"'{text}' is not FIRST:LAST, two numbers of steps from 1 on, such as 100:110")
    if int(last) < int(first):
        raise click.BadParameter(f"step {last} is before step {first}")
    if (steps := int(last) - int(first) + 1) > KEPT:
        raise click.BadParameter(f"{text} are {steps:,} steps; a trace has {KEPT} at most")
    return int(first), int(last)


profile_option = click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the times of tasks by rank to this JSON file; a trace of every action, where its name ends in .trace.json.",
)
_PROFILE_OPTIONS = (
    profile_option,
    click.option(
        "--trace-steps",
        callback=parse_steps,
        metavar="FIRST:LAST",
        help="Trace these steps, both included and counted from 1, and write the trace after the last; by default the last 100 of the job.",
    ),
    click.option(
        "--ops",
        is_flag=True,
        help="Trace the ops inside of segments, too, by onnxruntime's own times; that slows steps; a training needs --trace-steps, too.",
    ),
)


class WithLauncherOptions(click.Command):
    """A command that passes everything after `--` to the launcher."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_LAUNCHER_OPTIONS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


def place_options(command: Command) -> Command:
    """Adds the options for starting and running ranks."""
    for option in reversed(_PLACE_OPTIONS):
        command = option(command)
    return command


def profile_options(command: Command) -> Command:
    """Adds the options for a profile or a trace, of which `reporting_of` is made."""
    for option in reversed(_PROFILE_OPTIONS):
        command = option(command)
    return command


def reporting_of(given: Mapping[str, Any]) -> Reporting:
    """What the `profile_options` ask for."""
    path: Path | None = given["profile"]
    file = None if path is None else str(path.absolute())
    return Reporting(profile=file, steps=given.get("trace_steps", ()), ops=given.get("ops", False))


def origin_options(command: Command) -> Command:
    """Adds the options that allow the code and paths that an artifact names."""
    for option in reversed(_ORIGIN_OPTIONS):
        command = option(command)
    return command


def start(ctx: click.Context, folder: Path, job: Job, chosen: Mapping[str, Any]) -> int:
    """Runs a job as the `place_options` and the environment say; the exit code."""
    job = dataclasses.replace(
        job,
        threads=chosen["threads"],
        devices=chosen["devices"],
        stall=chosen["stall"],
        trust=chosen["trust"],
        max_bytes=chosen["max_bytes"],
        reporting=dataclasses.replace(
            job.reporting,
            quiet=job.reporting.quiet or console.is_quiet(),
            verbose=bool(console.verbose()),
            json=console.as_json(),
        ),
    )
    ranks, in_process = chosen["ranks"], chosen["in_process"]

    if chosen["hostfile"] is not None and (why := fault(chosen["hostfile"])):
        raise UsageError(f"--hostfile {chosen['hostfile']}: {why}\n  help: give a text file with a host a line")
    place = surrounding_job(os.environ)
    restarts = job.training is not None and job.training.restarts > 0
    if restarts and (place is not None or in_process):
        fact = (
            "the ranks are threads of this process"
            if in_process
            else "this process is a rank of another launcher's job"
        )
        raise UsageError(
            f"--restarts: {fact}\n  it starts a launcher again, which it has started itself\n  help: leave it out"
        )
    if place is not None and not in_process:
        return _as_rank(job, place)
    from partc.cli.job.rank import prepare, wrong_ranks

    job, manifest = prepare(job, ranks)
    if ranks not in (None, manifest.ranks):
        console.failure(wrong_ranks(str(folder), manifest, ranks or 0))
        return 2
    if in_process or (manifest.ranks == 1 and not restarts):
        from partc.cli.launch.launch import run_here

        return run_here(job, manifest)
    from partc.cli.launch.launch import launch

    return launch(job, manifest, Hosts(chosen["hostfile"], chosen["hosts"]), ctx.meta[_LAUNCHER_OPTIONS])


def parse_sizes(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> dict[str, int]:
    """The `--set NAME=SIZE` options as a mapping."""
    sizes = {}
    for text in given:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise click.BadParameter(f"'{text}' is not NAME=SIZE, such as batch=32")
        sizes[name] = int(size)
    return sizes


@click.command(cls=WithLauncherOptions, options_metavar="[OPTIONS]", epilog="Options after -- go to the launcher.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option("--input", "inputs", multiple=True, metavar="X.NPZ|NAME=X.NPY|NAME=0.5", help="Inputs; may be repeated.")
@click.option("--random", type=int, metavar="SEED", help="Seed of random values for inputs without --input.")
@click.option(
    "--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol, for --random."
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the outputs to this .npz.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, metavar="N", help="Run N steps and print their times.")
@profile_options
@place_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folder: Path,
    inputs: tuple[str, ...],
    random: int | None,
    sizes: Mapping[str, int],
    output: Path | None,
    repeat: int,
    **chosen: Any,
) -> int:
    """Run the artifact in FOLDER (by default build) on its ranks.

    \b
    partc run --input x.npz -o y.npz
    partc run build/ --random 7 --set batch=32 --repeat 100
    partc run build/ --random 7 --repeat 20 --profile times.json        # for partc simulate build/ --times times.json
    mpiexec -n 5 partc run build/ --input x=x.npy       # under your own launcher
    """
    inference = InferenceJob(
        inputs=tuple(_absolute(spec) for spec in inputs),
        random=random,
        sizes=sizes,
        output=None if output is None else str(output.absolute()),
        repeat=repeat,
    )
    job = Job(str(folder.absolute()), inference, reporting=reporting_of(chosen))
    return start(ctx, folder, job, chosen)


def _absolute(spec: str) -> str:
    """An --input with an absolute path, since ranks may be started in another folder."""
    from partc.runtime.artifact.training.data_spec import literal

    name, equals, file = spec.partition("=")
    if equals and not Path(file).exists() and literal(file) is not None:
        return spec
    return f"{name}={Path(file).absolute()}" if equals and not Path(spec).exists() else str(Path(spec).absolute())


def _as_rank(job: Job, place: Place) -> int:
    """Runs this process's rank. Errors that the files alone show are printed by rank 0, before MPI begins."""
    from partc.cli.job.rank import prepare, run_rank, wrong_ranks

    try:
        refuse_inherited(os.environ)
        job, manifest = prepare(job, place.size)
        if place.size not in (None, manifest.ranks):
            launched = is_launched()
            text = (
                wrong_ranks(job.folder, manifest, place.size or 0)
                if launched
                else inherited_variables(os.environ, place)
            )
            return _refused(text, 2, place)
    except PartcError as error:
        return _refused(str(error), error.exit_code, place)
    sys.stdout.flush()
    code = run_rank(job)
    console.leave_to_ranks()
    return code


def _refused(text: str, code: int, place: Place) -> int:
    """Prints an error that all ranks find alike, on rank 0 only."""
    if place.rank == 0 or not is_launched():
        console.failure(text)
    else:
        console.leave_to_ranks()
    return code
