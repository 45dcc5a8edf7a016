"""The command `partc diff`: what changed between two artifacts, for a review by people or in CI."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from partc.cli.commands.run import parse_sizes
from partc.cli.output import console
from partc.cli.output.table import Table, show_tables
from partc.runtime.errors import UsageError
from partc.runtime.units import count, seconds, size_text

if TYPE_CHECKING:
    from partc.cli.difference import Difference, Threshold

_SHOWN = 20
_TITLES = {
    "placement": "where nodes run",
    "layouts": "how nodes are cut",
    "shards": "what ranks hold of weights",
    "communication": "what travels",
}


def _thresholds(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[Threshold]:
    from partc.cli.difference import parse_threshold

    thresholds, problems = [], []
    for text in given:
        try:
            thresholds.append(parse_threshold(text))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise click.BadParameter("\n  ".join(problems))
    return thresholds


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--set", "set_sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol.")
@click.option(
    "--fail-if",
    "thresholds",
    multiple=True,
    metavar="NAME>AMOUNT",
    callback=_thresholds,
    help="End with 1 where a measure grew by more, such as bytes>5%, memory>100MB or placement>0; may be repeated.",
)
@click.option(
    "--machine",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Machine file, of `partc measure`: compare the time of a step there, too.",
)
@click.option("--all", "all_rows", is_flag=True, help="Show every change, not the first 20 of a kind.")
def command(
    first: Path,
    second: Path,
    set_sizes: Mapping[str, int],
    thresholds: Sequence[Threshold],
    machine: Path | None,
    all_rows: bool,
) -> int:
    """Show what changed from the artifact in FIRST to the one in SECOND: placement, layouts, shards of weights, communication, memory.

    Both are compared at the same sizes. Changes that differ in the numbers of their names alone are one row. Measures for --fail-if are
    messages, bytes, memory and weights, in percent or absolute, and with --machine the time of a step, in percent; of placement, layouts,
    shards and communication the number of changes counts. Exit code 1 where a threshold is exceeded.

    \b
    partc diff main/build build
    partc diff main/build build --fail-if 'bytes>5%' --fail-if 'placement>0'
    """
    from partc.cli.difference import TIME, common_sizes, differences, exceeded
    from partc.compiler.cost.machine_file import read_machine
    from partc.runtime.artifact.manifest import open_artifact

    if machine is None and (of_time := [one.text for one in thresholds if one.name == TIME]):
        help = "give --machine, a file that `partc measure` writes"
        raise UsageError(f"--fail-if {of_time[0]}: the time of a step is not known without a machine\n  help: {help}")
    measured = None if machine is None else read_machine(machine)
    old, new = open_artifact(first, trust=True), open_artifact(second, trust=True)
    sizes = common_sizes(old, new, set_sizes)
    programs, unknown = differences(old, new, sizes, measured)
    beyond = exceeded(thresholds, programs)
    console.result(
        {
            "ok": not beyond,
            "first": str(first),
            "second": str(second),
            "sizes": dict(sizes),
            "ranks": [old.manifest.ranks, new.manifest.ranks],
            "programs": {
                one.program: {
                    "measures": {row.name: {"before": row.before, "after": row.after} for row in one.measures},
                    "changes": [dataclasses.asdict(change) for change in one.changes],
                }
                for one in programs
            },
            "exceeded": beyond,
        }
    )
    if old.manifest.ranks != new.manifest.ranks:
        console.echo(f"ranks: {old.manifest.ranks} became {new.manifest.ranks}\n")
    for one in programs:
        if len(programs) > 1:
            console.echo(f"program {one.program}")
        if one.changes or any(row.grown for row in one.measures):
            show_tables(_tables(one, None if all_rows else _SHOWN))
        else:
            console.echo("nothing is placed, cut or sent otherwise, and no measure differs")
        console.echo()
    if sizes:
        console.echo(f"sizes are for {', '.join(f'{name}={size}' for name, size in sizes.items())}; --set changes them")
    if unknown:
        console.echo(f"without {count(unknown, 'value')} whose size is known only at run time")
    for text in beyond:
        console.echo(f"exceeded: {text}", err=True)
    return 1 if beyond else 0


def _tables(difference: Difference, most: int | None) -> Iterator[Table]:
    """The measures, and a table of changes for each kind that has any."""
    from partc.cli.difference import IN_BYTES, KINDS, MEASURES, TIME, grouped_changes

    table = Table(["measure", ">before", ">after", ">change"])
    for one in difference.measures:
        shown = size_text if one.name in IN_BYTES else _time if one.name == TIME else "{:,}".format
        change = "=" if not one.grown else "new" if not one.before else f"{one.percent:+.3g} %"
        table.add(MEASURES[one.name], shown(one.before), shown(one.after), change)
    yield table
    for kind in KINDS:
        rows = grouped_changes(difference.of(kind))
        if not rows:
            continue
        left = 0 if most is None else max(len(rows) - most, 0)
        title = f"{_TITLES[kind]}: {count(len(difference.of(kind)), 'change')}"
        table = Table(["", ">times", "name", "before", "after", "why"], title=title)
        for row, times in rows[: len(rows) - left]:
            sign = "+" if not row.before else "-" if not row.after else "~"
            table.add(sign, times, row.name, row.before or "-", row.after or "-", row.why)
        if left:
            table.add("", "", f"and {count(left, 'row')} more, which --all shows", "", "", "")
        yield table


def _time(nanoseconds: int) -> str:
    return seconds(nanoseconds / 1e9)
