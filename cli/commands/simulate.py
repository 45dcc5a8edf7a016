"""The command `partc simulate`: plays a step of an artifact on a machine, or a pipeline's schedule with given task times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.run import parse_sizes
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.errors import UsageError, reason_of
from partc.runtime.files.counted import SCHEDULE_BYTES, read_text

if TYPE_CHECKING:
    from partc.cli.output.pipeline import Times
    from partc.compiler.schedule.costs import Costs
    from partc.compiler.schedule.schedule import Schedule
    from partc.compiler.schedule.stages import Stages

_TWO_STAGES = ("interleaved", "zbv")
"""Schedules for which a rank has two stages unless more are asked for."""
_SHOWN = 8


@dataclass(frozen=True)
class _Options:
    """What the options say besides a schedule and its homes: F, B and W are of all ranks, or of each stage."""

    microbatches: int
    times: tuple[list[float], list[float], list[float]]
    message: float
    memory: str | None
    measured: Times | None


def _numbers(
    kind: Callable[[str], float],
) -> Callable[[click.Context, click.Parameter, str | None], list[float] | None]:
    """The callback that reads numbers with commas between them."""

    def read(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[float] | None:
        if text is None:
            return None
        try:
            found = [kind(one) for one in text.split(",")]
        except ValueError:
            found = [-1]
        if not all(0 <= one < float("inf") for one in found):
            raise click.BadParameter(f"'{text}' is not a list of numbers of at least 0, separated by commas")
        return found

    return read


def _time_option(name: str, help: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.option(name, metavar="T[,T...]", callback=_numbers(float), help=help)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False, metavar="[FOLDER|PLAN]")
@click.option(
    "--machine",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Machine file, of `partc measure`: play a step on it.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Trace of the artifact (--profile x.trace.json of partc run or train), whose times take the place of the machine's.",
)
@click.option("--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol.")
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="The model of the PLAN.")
@click.option("--program", default="", metavar="NAME", help="Play this program, such as 'evaluate' of a training.")
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts that the ranks are on.")
@click.option(
    "--schedule", "name", metavar="NAME", help="gpipe, 1f1b, interleaved, zb_h1, zbv or auto; without it, compare all."
)
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks (or groups of ranks).")
@click.option("--stages", type=click.IntRange(min=1), help="Number of stages: one per rank, or two (interleaved, zbv).")
@click.option("--placement", metavar="R,R,...", callback=_numbers(int), help="The rank of each stage, such as 0,1,1,0.")
@click.option("--microbatches", "-m", type=int, help="Number of microbatches of a step.")
@_time_option("--forward", "Time of F: of a rank and microbatch, or of each stage. Default 1.")
@_time_option("--backward", "Time of B without the gradients of parameters. Default 1.")
@_time_option("--weight", "Time of W, the gradients of parameters. Default 1.")
@click.option(
    "--message",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Time of a message between ranks, of an artifact with --times in seconds. Default 0.",
)
@click.option("--memory", metavar="LIMIT", help="Memory limit of a rank, such as '2.5 microbatches'.")
@click.option(
    "--times",
    multiple=True,
    metavar="FILE|TASK=TIME",
    help="Seconds by stage and kind, or by task: a JSON file, one of --profile, or 0F=1.2ms; may be repeated.",
)
@click.option(
    "--rows", type=click.Path(path_type=Path, dir_okay=False), help="Simulate the rows of this file, one line per rank."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    folder: Path | None,
    machine: Path | None,
    trace: Path | None,
    sizes: Mapping[str, int],
    model: Path | None,
    program: str,
    hosts: int,
    name: str | None,
    ranks: int | None,
    stages: int | None,
    placement: list[float] | None,
    microbatches: int | None,
    forward: list[float] | None,
    backward: list[float] | None,
    weight: list[float] | None,
    message: float,
    memory: str | None,
    times: tuple[str, ...],
    rows: Path | None,
    as_json: bool,
) -> int:
    """Play a step of an artifact on a machine; or show time, bubble and memory of a pipeline's schedule, or compare all schedules.

    On a machine: the time of a step, what each rank computes, how long it is idle, its memory, and the critical path by modules.

    \b
    partc simulate build/ --machine machine.yaml --set batch=64
    partc simulate plan.yaml --model model.py --machine machine.yaml --set batch=64
    partc simulate build/ --trace x.trace.json --set batch=64   # with what partc run --profile x.trace.json measured

    A task is a stage, F (forward), B (backward) or W (gradients of parameters), and a microbatch: 2F0. Where there is no W, B is the whole
    backward pass. The grid shows ranks over time; the bubble is the idle share.

    \b
    partc simulate build/                                    # the rows of an artifact, in units
    partc simulate build/ --times times.json                 # with the times that partc train --profile times.json measured
    partc simulate build/ --times 0F=1.2ms --times 0B=2.5ms --times 1F=1ms --times 1B=2ms
    partc simulate --ranks 4 -m 8                            # compare all schedules
    partc simulate --schedule zbv --ranks 4 -m 8             # rows, grid, total, peaks
    partc simulate --schedule auto --ranks 4 -m 8 --memory '2 microbatches'
    partc simulate --schedule 1f1b --stages 4 -m 8 --forward 1,1,1,1.6 --message 0.1
    partc simulate --rows rows.txt --placement 0,1,1,0 -m 4  # check and simulate given rows
    partc simulate --schedule zb_h1 --ranks 2 -m 8 --times times.json    # {"0F": 0.012, "0B": 0.02, "1F3": 0.5, ...}
    """
    from partc.cli.output.pipeline import read_times

    measured = read_times(times) if times else None
    on_machine = machine is not None or trace is not None
    if on_machine or (folder is not None and folder.suffix in (".yaml", ".yml")):
        schedules = (name, ranks, stages, placement, microbatches, forward, backward, weight, memory, rows, measured)
        if folder is None or not on_machine or any(one is not None for one in schedules):
            help = "partc simulate build/ --machine machine.yaml --set batch=64; `partc measure -o machine.yaml` writes the file"
            raise UsageError(
                f"a step is played of an artifact or a plan, on a machine or by a trace alone\n  help: {help}"
            )
        from partc.cli.simulation.run import Request, simulate_step

        return simulate_step(folder, model, Request(machine, trace, sizes, hosts, program), as_json)
    if sizes or model is not None or program or hosts > 1:
        raise UsageError("--set, --model, --program and --hosts are of a step\n  help: give --machine or --trace, too")
    if folder is not None:
        others = (name, ranks, stages, placement, microbatches, forward, backward, weight, memory, rows)
        if any(one is not None for one in others):
            help = "with FOLDER, give --times, --message and --json alone"
            raise UsageError(f"{folder}: the artifact has its rows and stages\n  help: {help}")
        return _play(folder, measured, message, as_json)
    if microbatches is None:
        raise UsageError("the number of microbatches is not known\n  help: use -m, or give the folder of an artifact")
    if name is not None and rows is not None:
        raise UsageError("--schedule and --rows are two schedules\n  help: give one of them")
    if placement is not None and (ranks or stages):
        raise UsageError("--placement says where each stage is\n  help: leave out --ranks and --stages")
    settings = _Options(microbatches, (forward or [1.0], backward or [1.0], weight or [1.0]), message, memory, measured)
    if name is None and rows is None and placement is None:
        if ranks and stages:
            raise UsageError("all schedules are compared by ranks\n  help: leave out --stages, or give --schedule")
        return _compare(_checked_ranks(ranks or stages), settings, as_json)
    homes = [int(one) for one in placement] if placement else _homes(name or "", ranks, stages)
    schedule, costs = _chosen(name or "auto", homes, settings, rows)
    if as_json:
        console.echo(json.dumps(_document(schedule, costs), indent=1))
        return 0
    from partc.compiler.schedule.grid import schedule_text

    console.echo(schedule_text(schedule, costs), nl=False)
    return 0


def _play(folder: Path, times: Times | None, message: float, as_json: bool) -> int:
    """The rows of an artifact."""
    from partc.cli.output.pipeline import compared, pipeline_of, timed
    from partc.compiler.schedule.costs import unit_costs
    from partc.compiler.schedule.grid import schedule_text
    from partc.compiler.schedule.simulate import simulate
    from partc.runtime.artifact.manifest import open_artifact

    pipeline = pipeline_of(open_artifact(folder, trust=True))
    if pipeline is None:
        help = "play its step on a machine: --machine machine.yaml; or compile with a plan that has `pipeline`"
        raise UsageError(f"{folder}: it has no tasks\n  help: {help}")
    schedule = pipeline.schedule
    costs = timed(
        schedule, unit_costs(schedule.stages, message), times.seconds if times else {}, times.where if times else ""
    )
    comparison = compared(schedule, costs, times.profile) if times and times.profile else None
    if as_json:
        document = _document(schedule, costs) | ({"measured": dataclasses.asdict(comparison)} if comparison else {})
        console.echo(json.dumps(document, indent=1))
        return 0
    console.echo(schedule_text(schedule, costs), nl=False)
    console.echo()
    critical = " ".join(map(str, simulate(schedule, costs).critical))
    console.echo(f"critical path: {critical}")
    if comparison is not None:
        console.echo(str(comparison))
    return 0


def _checked_ranks(ranks: int | None) -> int:

    if ranks is None:
        raise UsageError("the number of ranks is not known\n  help: use --ranks, --stages or --placement")
    return ranks


def _homes(name: str, ranks: int | None, stages: int | None) -> list[int]:
    """The rank of each stage: one each, there and back for zbv, else in turn."""

    each = 2 if name in _TWO_STAGES else 1
    if ranks is None:
        if stages is not None and stages % each:
            raise UsageError(
                f"--stages {stages}: {name} has {each} stages per rank\n  help: use a multiple of {each}, or --ranks"
            )
        ranks = _checked_ranks(stages) // each
    stages = stages or ranks * each
    if stages % ranks:
        raise UsageError(
            f"--stages {stages} cannot be divided evenly among --ranks {ranks}\n  help: use --placement for the rank of each stage"
        )
    if name == "zbv" and stages == 2 * ranks:
        return [*range(ranks), *reversed(range(ranks))]
    return [*range(ranks)] * (stages // ranks)


def _costs(stages: Stages, settings: _Options) -> Costs:
    """Costs of stages from times of each, or of a rank's stages together."""
    from partc.compiler.schedule.costs import Costs, StageCost, unit_costs, with_times

    shares = [cost.saved for cost in unit_costs(stages).stages]
    columns = []
    for option, times in zip(("--forward", "--backward", "--weight"), settings.times, strict=True):
        if len(times) not in (1, len(stages)):
            help = "use one time for all ranks, or one for each stage"
            raise UsageError(f"{option}: {len(times)} times for {len(stages)} stages\n  help: {help}")
        columns.append(times if len(times) > 1 else [times[0] * share for share in shares])
    some = zip(*columns, shares, strict=True)
    costs = Costs(tuple(StageCost(f, b, w, saved=share) for f, b, w, share in some), settings.message)
    if settings.measured is None:
        return costs
    try:
        return with_times(costs, settings.measured.seconds)
    except ValueError as error:
        help = 'write an object of seconds by stage and kind, or by task: {"0F": 0.01, "1B3": 0.2}'
        raise UsageError(f"{settings.measured.where}: {error}\n  help: {help}") from None


def _chosen(name: str, homes: Sequence[int], settings: _Options, rows: Path | None = None) -> tuple[Schedule, Costs]:
    """The schedule of a name, or of the rows in a file."""
    from partc.compiler.schedule.stages import chain
    from partc.compiler.schedulers.choose import choose

    if set(homes) != set(range(max(homes) + 1)):
        shown = ",".join(map(str, homes))
        raise UsageError(f"--placement {shown}: ranks without a stage\n  help: number ranks from 0 on without gaps")
    stages = chain(homes)
    costs = _costs(stages, settings)
    if rows is None:
        return choose(stages, settings.microbatches, name, settings.memory, costs, "partc simulate"), costs
    lines = [(number, line) for number, line in enumerate(_text(rows).splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line.strip() and not line.startswith("#")]
    places = [f"{rows}:{number}" for number, _ in lines]
    texts = [line for _, line in lines]
    return choose(stages, settings.microbatches, texts, settings.memory, costs, str(rows), places), costs


def _text(rows: Path) -> str:

    try:
        return read_text(rows, SCHEDULE_BYTES)
    except UnicodeDecodeError as error:
        fact = f"is not UTF-8 text: {error}"
    except OSError as error:
        fact = reason_of(error)
    raise UsageError(f"{rows}: {fact}\n  help: give a text with the tasks of a rank a line, such as 0F0 0F1 0B0 0B1")


def _document(schedule: Schedule, costs: Costs) -> dict[str, object]:
    """All that the simulation says, for other programs."""
    from partc.compiler.schedule.grid import message_counts
    from partc.compiler.schedule.memory import peaks
    from partc.compiler.schedule.simulate import simulate

    timing, stages = simulate(schedule, costs), schedule.stages
    return {
        "schedule": schedule.name,
        "homes": [list(homes) for homes in stages.stage_ranks],
        "microbatches": schedule.microbatches,
        "rows": [" ".join(map(str, row)) for row in schedule.rows],
        "total": timing.total,
        "period": timing.period,
        "bubble": timing.bubble,
        "overhead": timing.overhead,
        "idle": list(timing.idle),
        "peaks": list(peaks(schedule, costs)),
        "messages": {f"{one} - {other}": count for (one, other), count in message_counts(schedule).items()},
        "critical": " ".join(map(str, timing.critical)),
        "tasks": {str(task): span for task, span in sorted(timing.spans.items(), key=lambda item: item[1])},
    }


def _compare(ranks: int, settings: _Options, as_json: bool) -> int:
    """One line a schedule, on the same ranks."""
    from partc.compiler.errors import CompileError
    from partc.compiler.schedule.grid import message_counts, percent
    from partc.compiler.schedule.memory import peaks
    from partc.compiler.schedule.simulate import simulate

    if settings.measured is not None or any(len(times) > 1 for times in settings.times):
        raise UsageError("times of single stages need one schedule\n  help: use one time for all ranks, or --schedule")
    turn, vee = [*range(ranks)], [*range(ranks), *reversed(range(ranks))]
    table = Table(["schedule", "stages on ranks", ">total", ">bubble", ">overhead", ">keeps at most", ">messages"])
    documents = []
    for name, homes in [
        *((name, turn) for name in ("gpipe", "1f1b", "zb_h1")),
        ("interleaved", turn * 2),
        ("zbv", vee),
        *(("auto", homes) for homes in (turn, vee)),
    ]:
        shown = ",".join(map(str, homes if len(homes) <= _SHOWN else [*homes[:4], "..", *homes[-4:]]))
        try:
            schedule, costs = _chosen(name, homes, settings)
        except CompileError:
            if name == "auto" or settings.microbatches < 1:
                raise
            table.add(name, shown, *[""] * 3, "over the limit", "")
            continue
        timing, sent = simulate(schedule, costs), sum(message_counts(schedule).values())
        kept = f"{max(peaks(schedule, costs)):.4g}"
        table.add(name, shown, f"{timing.total:.6g}", percent(timing.bubble), percent(timing.overhead), kept, sent)
        documents.append(_document(schedule, costs))
    if as_json:
        console.echo(json.dumps(documents, indent=1))
        return 0
    table.show()
    console.echo()
    console.echo("bubble: idle share of the ranks; overhead: total over the work of a rank, less one")
    console.echo("keeps at most: microbatches that a rank keeps between F and the end of their backward pass")
    return 0
