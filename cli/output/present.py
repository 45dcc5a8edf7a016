"""Tables and numbers as the commands print them: aligned on any output, never cut, wrapped only on a terminal.

A number keeps all its digits and a name all its letters whatever the width; only a table's last column, made for words, is
wrapped, and only where the output is a terminal with room for it.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import click
from partc.cli.output import say
from partc.runtime.errors import one_line, printable

_GAP = "  "
_NARROWEST = 24


@dataclass(frozen=True)
class Table:
    """Rows under named columns; a column whose name begins with `>` is set to the right."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""

    def add(self, *cells: object) -> None:
        """Adds a row."""
        self.rows.append([one_line(str(cell)) for cell in cells])

    def lines(self, width: int | None = None) -> list[str]:
        """Header and rows as aligned lines without trailing blanks; the last column is wrapped to `width` if it can be."""
        header = [name.removeprefix(">") for name in self.columns]
        widths = [max(map(len, column)) for column in zip(header, *self.rows, strict=True)]
        right = [name.startswith(">") for name in self.columns]
        room = None if width is None else width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1)
        lines = []
        for row in [header, *self.rows]:
            words = [row[-1]]
            if room is not None and room >= _NARROWEST and not right[-1]:
                words = textwrap.wrap(row[-1], room) or [""]
            blank = [""] * (len(row) - 1)
            for at, word in enumerate(words):
                cells = [*(row[:-1] if at == 0 else blank), word]
                aligned = (
                    cell.rjust(width) if side else cell.ljust(width)
                    for cell, width, side in zip(cells, widths, right, strict=True)
                )
                lines.append(_GAP.join(aligned).rstrip())
        return lines

    def plain(self) -> str:
        """The table as it is printed where no terminal is."""
        return "\n".join(([self.title] if self.title else []) + self.lines())

    def show(self) -> None:
        """Prints the table to stdout, the header set off on a terminal."""
        if not sys.stdout.isatty():
            say.echo(self.plain())
            return
        header, *rows = self.lines(shutil.get_terminal_size().columns)
        if self.title:
            click.secho(printable(self.title), bold=True)
        click.secho(header, dim=True)
        say.echo("\n".join(rows))


def show_tables(tables: Iterable[Table]) -> None:
    """Prints tables one below the other with a blank line between."""
    for at, table in enumerate(tables):
        if at:
            say.echo()
        table.show()


def size(count: int) -> str:
    """Bytes for people: three digits and a binary unit: `812 B`, `1.25 KiB`, `30.0 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    value, unit = count / 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def seconds(duration: float) -> str:
    """A duration for people: three digits and a unit: `1.23 s`, `45.6 ms`, `789 us`."""
    scale, unit = (1.0, "s") if duration >= 1 else (1e-3, "ms") if duration >= 1e-3 else (1e-6, "us")
    return f"{duration / scale:.3g} {unit}" if duration / scale < 999.5 else f"{duration / scale:.0f} {unit}"


def count(number: int, word: str, words: str = "") -> str:
    """A number with its word in the right form: `1 rank`, `5 ranks`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {words or word + 's'}"


def timing(loaded: float, times: Sequence[float]) -> str:
    """The line for a load time and the times of all steps, in seconds; the first step is apart, since it warms up.

    loaded in 412 ms, first step 12.3 ms, then 99 steps: median 1.02 ms, min 998 us, p90 1.2 ms; 968 steps/s
    """
    text = f"loaded in {seconds(loaded)}, first step {seconds(times[0])}"
    rest = sorted(times[1:])
    if not rest:
        return text
    p90 = rest[min(len(rest) - 1, round(0.9 * (len(rest) - 1)))]
    figures = f"median {seconds(statistics.median(rest))}, min {seconds(rest[0])}, p90 {seconds(p90)}"
    return f"{text}, then {count(len(rest), 'step')}: {figures}; {len(rest) / sum(rest):,.4g} steps/s"
