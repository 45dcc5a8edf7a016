"""The command `partc cache`: exports of folders of `transformers`, which are kept so that torch exports a model once."""

from __future__ import annotations

import datetime

import click
from partc.cli.output import console
from partc.cli.output.table import Table
from partc.runtime.units import count, size_text

no_cache = click.option(
    "--no-cache", is_flag=True, help="Export a folder of transformers anew, and do not keep the export."
)
"""The option of commands that read a model."""


@click.command()
@click.argument("action", type=click.Choice(["show", "clear"]), default="show")
def command(action: str) -> int:
    """Show the kept exports, or remove them.

    What torch exports of a folder of transformers is kept without its weights, so that `partc plan`, `compile` and `verify` export it once.
    An export is used while configuration, names of weights, versions of the libraries and partc itself are the same. All take at most 1
    GiB; --no-cache of these commands keeps none. PARTC_CACHE names another folder than ~/.cache/partc; if it is empty, nothing is kept.

    \b
    partc cache
    partc cache clear
    """
    from partc.compiler.frontend.huggingface import export_cache

    home = export_cache.cache_folder()
    if home is None:
        console.echo("PARTC_CACHE is empty: no export is kept")
        return 0
    if action == "clear":
        console.echo(f"{home}: removed {count(export_cache.clear(), 'export')}")
        return 0
    exports = export_cache.entries()
    table = Table(["export", "model", ">size", "last used"])
    for path, size, used in exports:
        when = datetime.datetime.fromtimestamp(used).strftime("%Y-%m-%d %H:%M")
        table.add(path.stem[:12], export_cache.model_of(path), size_text(size), when)
    if exports:
        table.show()
    console.echo(f"{home}: {count(len(exports), 'export')}, {size_text(sum(size for _, size, _ in exports))}")
    return 0
