"""The command `partc check`: every violation in an artifact, or one line that says what was proved."""

from __future__ import annotations

from pathlib import Path

import click
from partc.cli.output import say
from partc.cli.output.present import count


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("build"))
def command(folder: Path) -> int:
    """Prove an artifact sound from its files alone; nothing is run.

    Hashes and sizes, schemas, external data, the matching and the order of all communication over the ranks, values
    that nobody makes; of training, that updates in place are safe and copies of a tensor stay equal. What a training names outside
    of the folder is listed. Exit code 1 where anything is wrong.

    \b
    partc check build/
    """
    from partc.runtime.checker.check import check

    checked = check(folder)
    counts = {key: getattr(checked, key) for key in ("ranks", "files", "nodes", "transfers", "collectives")}
    found = [str(violation) for violation in checked.violations]
    named = [str(one) for one in checked.named]
    say.result({"ok": not found, "folder": str(folder), "violations": found, **counts, "named": named})
    for violation in checked.violations:
        say.echo(str(violation), err=True)
    if checked.violations:
        say.echo(f"{folder}: {count(len(checked.violations), 'violation')}", err=True)
        return 1
    parts = [
        count(checked.ranks, "rank"),
        count(checked.files, "file"),
        count(checked.nodes, "node"),
        count(checked.transfers, "transfer"),
    ]
    if checked.collectives:
        parts.append(count(checked.collectives, "collective"))
    say.echo(f"{folder}: ok, {', '.join(parts)}")
    for one in checked.named:
        say.echo(f"used only with --plan or --trust-code: {one}")
    if checked.in_place + checked.copied:
        safe = f"{count(checked.in_place, 'tensor')} safely updated in place"
        copied = f", {checked.copied:,} copied when a step ends" if checked.copied else ""
        equal = (
            f"; {count(checked.copies, 'shard')} on several ranks, whose copies stay equal" if checked.copies else ""
        )
        say.echo(f"training: {safe}{copied}{equal}")
    return 0
