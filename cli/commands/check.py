"""The command `partc check`: every violation in an artifact, or one line with the counts of what was checked."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click
from partc.cli.output import console
from partc.runtime.errors import RankError
from partc.runtime.units import count

_SHOWN = 100


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
@click.option(
    "--memory", is_flag=True, help="Also load all ranks here, and prove that values of a step do not overlap in memory."
)
def command(folder: Path, memory: bool) -> int:
    """Check an artifact from its files alone; nothing is run.

    Checked are hashes, schemas, types and shapes, external data, the matching and order of communication between all ranks, and the
    layouts of values; for training also that in-place updates are safe and replicas stay identical; of a pipeline also that every
    microbatch goes once through every task, and how much is kept for backward passes. How a node carries shards is what the file says
    of its op (partc.factors), which is relied on. Code, and paths outside of the folder, that the artifact names are listed. Exit code
    1 if there is a violation.

    \b
    partc check build/
    partc check build/ --memory
    """
    from partc.runtime.checker.check import check

    checked = check(folder)
    counts = {key: getattr(checked, key) for key in ("ranks", "files", "nodes", "transfers", "collectives")}
    violations = [str(violation) for violation in checked.violations]
    if memory and not violations:
        violations = _overlaps(folder)
    named = [str(one) for one in checked.named]
    document = {"ok": not violations, "folder": str(folder), "violations": violations, **counts, "named": named}
    if checked.microbatches:
        document |= {"microbatches": checked.microbatches, "kept": [dataclasses.asdict(one) for one in checked.memory]}
    console.result(document)
    for text in violations[:_SHOWN]:
        console.echo(text, err=True)
    if len(violations) > _SHOWN:
        console.echo(f"... and {len(violations) - _SHOWN:,} more, which --json lists", err=True)
    if violations:
        console.echo(f"{folder}: {count(len(violations), 'violation')}", err=True)
        return 1
    parts = [
        count(checked.ranks, "rank"),
        count(checked.files, "file"),
        count(checked.nodes, "node"),
        count(checked.transfers, "transfer"),
    ]
    if checked.collectives:
        parts.append(count(checked.collectives, "collective"))
    console.echo(f"{folder}: ok, {', '.join(parts)}")
    if checked.lacks_weights:
        console.echo("without weights: none of their files is there, and the artifact cannot be run")
    if memory:
        console.echo("memory: no two values of a step overlap while both are needed, at typical sizes")
    for name in checked.named:
        console.echo(f"used only with --plan or --trust-code: {name}")
    if checked.state.in_place + checked.state.copied:
        safe = f"{count(checked.state.in_place, 'tensor')} safely updated in place"
        copied = f", {checked.state.copied:,} copied at the end of a step" if checked.state.copied else ""
        equal = (
            f"; {count(checked.state.copies, 'replicated shard')}, proven to stay identical"
            if checked.state.copies
            else ""
        )
        console.echo(f"{'training' if checked.trains else 'kept'}: {safe}{copied}{equal}")
    if checked.microbatches:
        console.echo(f"pipeline: {checked.microbatches} microbatches, each once in every task")
    for one in checked.memory if any(one.microbatches for one in checked.memory) else ():
        unknown = f" and {count(one.unknown, 'value')} of unknown size" if one.unknown else ""
        ranks = f"rank {one.ranks}" if one.ranks.isdecimal() else f"ranks {one.ranks}"
        kept = f"{one.microbatches:.6g} {'microbatch' if one.microbatches == 1 else 'microbatches'}"
        console.echo(f"  {ranks}: at most {kept} kept for backward passes, {one.bytes} bytes{unknown}")
    return 0


def _overlaps(folder: Path) -> list[str]:
    """What the proofs of the memory of each rank's step find, of every program, at typical sizes."""
    from partc.runtime import load_local
    from partc.runtime.artifact.legal_sizes import typical_sizes
    from partc.runtime.artifact.manifest import open_artifact
    from partc.runtime.execution.memory.freed import VARIABLE

    os.environ[VARIABLE] = "1"
    overlaps: list[str] = []
    for name in open_artifact(folder).programs:
        with load_local(folder, program=name) as ranks:
            for rank in ranks.ranks:
                try:
                    rank.prepare(typical_sizes(ranks.manifest))
                except RankError as error:
                    overlaps.append(f"program '{name}': {error}")
    return overlaps
