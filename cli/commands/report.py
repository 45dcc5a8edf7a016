"""The command `partc report`: one HTML file that shows an artifact, alone or beside another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from partc.cli.commands.run import parse_sizes
from partc.cli.output import console
from partc.runtime.units import size_text


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The file that is written.",
)
@click.option("--program", default="", metavar="NAME", help="Show this program, such as 'evaluate' of a training.")
@click.option("--set", "set_sizes", multiple=True, metavar="NAME=SIZE", callback=parse_sizes, help="Size of a symbol.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The artifact before a change, to compare with.",
)
@click.option(
    "--machine",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Machine file, of `partc measure`: show a step played on it.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Trace of the artifact (--profile x.trace.json of partc run or train): show a measured step beside the simulated one.",
)
def command(
    folder: Path,
    out: Path,
    program: str,
    set_sizes: Mapping[str, int],
    against: Path | None,
    machine: Path | None,
    trace: Path | None,
) -> int:
    """Write a page that shows the artifact in FOLDER (by default build): graph, transfers, memory, schedule.

    It is one file that opens in any browser and loads nothing. Modules open down to the nodes of each rank; every transfer has its bytes
    and its cause. With --trace a measured step is shown beside the simulated one, on a --machine or by the trace's medians.

    \b
    partc report build/ -o report.html --set batch=64
    partc report build/ --against main/build                # what a change does, for a review
    partc report build/ --trace x.trace.json --set batch=64 # why a rank is slow
    """
    from partc.cli.report.document import Request
    from partc.cli.report.page import page_text, report_data
    from partc.runtime.artifact.manifest import open_artifact
    from partc.runtime.files.replace import refuse_other, write_text

    refuse_other(out)
    artifact = open_artifact(folder, trust=True, program=program)
    other = open_artifact(against, trust=True, program=program) if against is not None else None
    text = page_text(f"partc report: {folder}", report_data(artifact, other, Request(set_sizes, machine, trace)))
    write_text(out, text)
    console.echo(f"wrote {out}: {size_text(len(text.encode()))}")
    return 0
