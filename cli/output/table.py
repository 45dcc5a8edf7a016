"""Tables as the commands print them: aligned on any output, never truncated, wrapped only on a terminal.

A number is shown with all its digits and a name with all its letters at any width; only the last column, which has words, is
wrapped, and only where the output is a terminal with room for it. rich draws the progress bars but not these tables: it folds or
truncates every column at the console's width and pads lines with trailing blanks, and its import costs more than most commands print.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import click
from partc.cli.output import console
from partc.runtime.errors import one_line, printable

_GAP = "  "
_NARROWEST = 24


@dataclass(frozen=True)
class Table:
    """Rows under named columns; a column whose name begins with `>` is right-aligned."""

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
        """Returns the table as it is printed where the output is not a terminal."""
        return "\n".join(([self.title] if self.title else []) + self.lines())

    def show(self) -> None:
        """Prints the table to stdout, with a dimmed header on a terminal."""
        if not sys.stdout.isatty():
            console.echo(self.plain())
            return
        header, *rows = self.lines(shutil.get_terminal_size().columns)
        if self.title:
            click.secho(printable(self.title), bold=True)
        click.secho(header, dim=True)
        console.echo("\n".join(rows))


def show_tables(tables: Iterable[Table]) -> None:
    """Prints tables one below the other with a blank line between."""
    for at, table in enumerate(tables):
        if at:
            console.echo()
        table.show()
