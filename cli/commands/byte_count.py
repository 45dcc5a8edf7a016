"""The option `--max-bytes`: the memory limit for data that is not mapped."""

from __future__ import annotations

import click
from partc.runtime.units import parse_bytes


def byte_count(text: str) -> int:
    """The number of bytes of a text such as 8GB, 512MiB, 1.5G or 1000000; click.BadParameter for other texts."""
    found = parse_bytes(text)
    if found is None:
        raise click.BadParameter(f"'{text}' is not a size such as 8GB, 512MiB or 1000000")
    return found


def _parsed(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    return None if text is None else byte_count(text)


max_bytes = click.option(
    "--max-bytes",
    callback=_parsed,
    metavar="SIZE",
    help="Memory limit of a rank for compressed or random data, such as 8GB; by default half of the machine's.",
)
