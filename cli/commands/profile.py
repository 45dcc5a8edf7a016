"""The commands `partc profile`: where the time of a trace went, by rank, module and message; and `partc measure`: a machine's speeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import click
from partc.cli.commands.run import parse_sizes
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.artifact.trace import BETWEEN, CATEGORIES, OP, Span, read_trace
from partc.runtime.units import count, seconds, size_text

_WARM = 3
"""So many first steps are left out where there are more: in them memory is touched for the first time."""


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, metavar="N", help="Rows of a table.")
def command(trace: Path, top: int) -> int:
    """Show where the time of a TRACE went: by rank, by module, by op of a trace with --ops, and by message or collective.

    Times are of one step, the mean over all steps but the first three. What is left of a step is Python between actions, and, on a
    rank of several targets, time in which one of them waits for another. Behind it stands what a training does between
    steps. A trace that was cut short is read as far as it goes.

    \b
    partc run build/ --random 7 --repeat 20 --profile a.trace.json
    partc profile a.trace.json
    """

    read = read_trace(trace)
    numbers = sorted({one.about["step"] for one in read.spans})
    steady = {*(numbers[_WARM:] or numbers)}
    chosen = [one for one in read.spans if one.about["step"] in steady]
    ranks, modules, messages = _by_rank(chosen), _by_module(chosen), _by_message(chosen)
    steps, ops = _steps(chosen), _by_op(chosen)
    console.result(
        {
            "trace": str(trace),
            "whole": read.is_complete,
            "steps": steps,
            "ranks": ranks,
            "modules": modules,
            "messages": messages,
            **({"ops": ops, "profiled": "onnxruntime"} if read.has_ops else {}),
        }
    )
    cut = "" if read.is_complete else "; the file is cut short"
    clocks = f"; clocks of hosts agree within {seconds(read.error)}" if read.error else ""
    measured = len({one.about["step"] for one in chosen if one.category == OP})
    missing = f"; ops of {measured} of them" if measured < steps else ""
    profiled = f"{missing}; onnxruntime was profiled, which slows the steps" if read.has_ops else ""
    console.echo(f"{trace}: {count(len(ranks), 'rank')}, {count(steps, 'step')}{cut}{clocks}{profiled}")
    kinds = [kind for kind in CATEGORIES if any(row[kind] for row in ranks)]
    between = [kind for kind in BETWEEN if any(row[kind] for row in ranks)]
    _print("", ("rank", ">step", *(f">{kind}" for kind in (*kinds, "rest", *between))), ranks)
    _print("\nslowest modules (all ranks)", ("module", ">compute", ">share"), modules[:top])
    _print("\nslowest ops (all ranks)", ("op", "module", ">calls", ">time", ">share"), ops[:top])
    _print(
        "\nlongest in messages and collectives (all ranks)",
        ("what", ">time", ">bytes"),
        messages[:top],
    )
    return 0


def _by_rank(spans: list[Span]) -> list[dict[str, object]]:
    """By rank the seconds of its median step, and the means of what its actions took in a step, and what went on between steps."""

    rows: list[dict[str, object]] = []
    for rank in sorted({one.rank for one in spans}):
        own = [one for one in spans if one.rank == rank]
        steps = [one.seconds for one in own if one.category == "step"]
        took = dict.fromkeys((*CATEGORIES, *BETWEEN), 0.0)
        for one in own:
            if one.category in took:
                took[one.category] += one.seconds / max(1, len(steps))
        whole = sum(steps) / max(1, len(steps))
        rows.append(
            {
                "rank": rank,
                "step": median(steps) if steps else 0.0,
                **took,
                "rest": max(0.0, whole - sum(took[kind] for kind in CATEGORIES)),
            }
        )
    return rows


def _by_module(spans: list[Span]) -> list[dict[str, object]]:
    """Modules by what their computation took in a step on all ranks together, and its share of all; the slowest first."""
    took: dict[str, float] = defaultdict(float)
    for one in spans:
        if one.category in ("compute", "update"):
            took[str(one.about.get("module") or one.name)] += one.seconds
    steps, whole = _steps(spans), sum(took.values()) or 1.0
    ordered = sorted(took.items(), key=lambda one: -one[1])
    return [{"module": name, "compute": time / steps, "share": time / whole} for name, time in ordered]


def _by_op(spans: list[Span]) -> list[dict[str, object]]:
    """Ops by what they took in a step on all ranks together, of the steps whose ops were measured: calls and seconds a step, and the share
    of all computation; the slowest first."""

    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in spans:
        if one.category == OP:
            took[str(one.about["op"]), str(one.about["module"])].append(one.seconds)
    measured = {one.about["step"] for one in spans if one.category == OP}
    whole = sum(one.seconds for one in spans if one.category in ("compute", "update") and one.about["step"] in measured)
    rows: list[dict[str, object]] = []
    for (op, module), times in sorted(took.items(), key=lambda one: -sum(one[1])):
        calls, time = len(times) / len(measured), sum(times)
        rows.append(
            {"op": op, "module": module, "calls": calls, "time": time / len(measured), "share": time / (whole or 1.0)}
        )
    return rows


def _by_message(spans: list[Span]) -> list[dict[str, object]]:
    """Messages and collectives by what they took in a step on all ranks together, waits included; the longest first."""
    took: dict[str, list[Span]] = defaultdict(list)
    for one in spans:
        if one.category == "communication":
            took[one.name].append(one)
    steps = _steps(spans)
    ordered = sorted(took.items(), key=lambda one: -sum(span.seconds for span in one[1]))
    return [
        {"what": name, "time": sum(one.seconds for one in some) / steps, "bytes": some[0].about.get("bytes")}
        for name, some in ordered
    ]


def _steps(spans: list[Span]) -> int:
    return len({one.about["step"] for one in spans}) or 1


def _print(title: str, columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    if not rows:
        return
    table = Table(columns, title=title)
    for row in rows:
        table.add(*(_shown(name.removeprefix(">"), row[name.removeprefix(">")]) for name in columns))
    table.show()


def _shown(name: str, value: object) -> str:
    if name == "share":
        return f"{value:.0%}"
    if name == "calls":
        return f"{value:g}"
    if name == "bytes":
        return size_text(value) if isinstance(value, int) else ""
    return seconds(value) if isinstance(value, float) else str(value)


def _mesh(ctx: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, int]:
    """The sizes of a mesh's axes, `dp=2,tp=4`."""
    axes = {}
    for one in text.split(",") if text else ():
        name, _, size = one.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise click.BadParameter(f"'{text}' is not a mesh such as dp=2,tp=4")
        axes[name] = int(size)
    return axes


@click.command()
@click.option(
    "-o", "out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file that is written."
)
@click.option(
    "-n", "ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks that measure together."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads per rank; by default the cores are divided.")
@click.option(
    "--mesh", callback=_mesh, metavar="AXIS=SIZE,...", help="Measure links along each axis, such as dp=2,tp=2."
)
@click.option(
    "--of",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Measure this artifact's segments, too; may be repeated.",
)
@click.option(
    "--set", "sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol, for --of."
)
def measure(
    out: Path, ranks: int, threads: int | None, mesh: Mapping[str, int], of: Sequence[Path], sizes: Mapping[str, int]
) -> int:
    """Measure this machine, in under a minute, and write its speeds for partc simulate --machine.

    Ranks compute at the same time, as in a job: products and other kernels by size, a session's run, a step of next to nothing, a message
    and an AllReduce by size. The file is text, with the unit of every number.

    \b
    partc measure -o machine.yaml
    partc measure -o machine.yaml -n 4 --mesh dp=2,tp=2
    partc measure -o machine.yaml --of build/ --set batch=64    # its segments by themselves, which tells more than curves
    """
    from partc.cli.machine.measure import measure as measure_here

    return measure_here(out, ranks, threads, mesh, of, sizes)
