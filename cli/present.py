"""Tables and numbers as the commands print them: aligned on any output, wrapped only on a terminal, never cut.

A number keeps all its digits whatever the width; only a table's last column, made for words, is wrapped, and only where
the output is a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import click


@dataclass(frozen=True)
class Table:
    """Rows under named columns; a column whose name begins with `>` is set to the right."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""

    def add(self, *cells: object) -> None:
        """Adds a row."""
        self.rows.append([str(cell) for cell in cells])

    def plain(self) -> str:
        """The table as aligned lines without ruling and without trailing blanks."""
        names = [name.removeprefix(">") for name in self.columns]
        lines: list[Sequence[str]] = [names, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
        right = [name.startswith(">") for name in self.columns]
        text = [
            "  ".join(
                cell.rjust(width) if side else cell.ljust(width)
                for cell, width, side in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *text] if self.title else text)

    def show(self) -> None:
        """Prints the table to stdout, ruled by rich on a terminal."""
        if not sys.stdout.isatty():
            click.echo(self.plain())
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        ruled = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for at, name in enumerate(self.columns):
            words = at == len(self.columns) - 1 and not name.startswith(">")
            side = "right" if name.startswith(">") else "left"
            ruled.add_column(Text(name.removeprefix(">")), justify=side, no_wrap=not words, overflow="fold")  # type: ignore[arg-type]
        for row in self.rows:
            ruled.add_row(*(Text(cell) for cell in row))
        console = Console()
        needed = max((len(line) for line in self.plain().splitlines()), default=0)
        fixed = needed - max((len(row[-1]) for row in self.rows), default=0) + 24
        console.print(ruled, width=max(console.width, fixed), soft_wrap=fixed > console.width)


def show_tables(tables: Iterable[Table]) -> None:
    """Prints tables one below the other with a blank line between."""
    for at, table in enumerate(tables):
        if at:
            click.echo()
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
