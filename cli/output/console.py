"""The output of every command: text for people, one JSON document with `--json`, less with `-q`, more with `-v`.

With `--json` and `-q` the text that a command prints to stdout is discarded. With `--json` stdout has the document that the command
passes to `result`, or `{"error": text}` if it fails; the error's text is on stderr in any case. Exit codes do not depend on these
options. Numbers that JSON cannot express (nan, inf) are strings.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import click
from partc.runtime.errors import printable

DOCUMENT = "partc-document: "
"""Prefix of the line by which rank 0 sends the document to the launching process."""

WITH_JSON = ("compile", "verify", "check", "diff", "run", "eval", "generate", "doctor", "profile")
_SHOWS_NOTHING_ELSE = ("plan", "schema", "ops", "inspect", "simulate", "measure", "checkpoint")


_LONGEST = 4000


@dataclass
class _Mode:
    json: bool = False
    quiet: bool = False
    verbose: int = 0
    stdout: IO[str] | None = None
    printed: bool = False
    error: str = ""


_mode = _Mode()


def echo(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Prints a text with control characters escaped: it has names from models, plans and artifacts. Long lines on stderr are shortened."""
    shown = str(text)
    if err and len(shown) > _LONGEST:
        shown = "\n".join(map(_shortened, shown.split("\n")))
    click.echo(printable(shown), err=err, nl=nl)


def _shortened(line: str) -> str:
    """Removes the middle of a line that is too long: a name in a file may have a million letters."""
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    return f"{line[:half]} ... {len(line) - 2 * half:,} more characters ... {line[-half:]}"


def as_json() -> bool:
    """Whether the command's result is one JSON document."""
    return _mode.json


def verbose() -> int:
    """The requested level of details: 0, 1 with `-v`, or 2 with `-vv`."""
    return _mode.verbose


def is_quiet() -> bool:
    """Whether only failures and warnings are requested."""
    return _mode.quiet or _mode.json


def detail(text: str) -> None:
    """Prints a line on stderr with `-v`."""
    if _mode.verbose:
        echo(text, err=True)


def failure(text: str) -> None:
    """Prints the reason of the command's failure on stderr; with `--json` the document has this text."""
    echo(text, err=True)
    failed(text)


def failed(text: str) -> None:
    """Records the reason of the command's failure, where the text is on stderr already."""
    _mode.error = _mode.error or text


def result(document: Mapping[str, Any]) -> None:
    """Prints the command's document with `--json`, and nothing otherwise."""
    if not _mode.json or _mode.printed:
        return
    _mode.printed = True
    stream = _mode.stdout or sys.stdout
    text = json.dumps(plain(document), indent=1, ensure_ascii=False)
    escaped = (one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)
    stream.write("".join(escaped) + "\n")
    stream.flush()


def leave_to_ranks() -> None:
    """Prints no document in this process: it is one of several ranks, and another one prints it."""
    _mode.json = False


def plain(value: Any) -> Any:
    """Converts a value to JSON types: numbers that are not finite become strings, tuples become lists."""
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case str() | bool() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case int():
            return value
        case Sequence():
            return [plain(item) for item in value]
        case _:
            item = getattr(value, "item", None)
            return plain(item()) if callable(item) else str(value)


def end(code: int) -> None:
    """Ends a command: prints the document of an error if none was printed, and restores stdout."""
    if _mode.json and not _mode.printed and code:
        result({"error": _mode.error or f"exit code {code}"})
    if _mode.stdout is not None:
        sys.stdout.close()
        sys.stdout = _mode.stdout
    for name, value in vars(_Mode()).items():
        setattr(_mode, name, value)


def begin(arguments: Sequence[str]) -> None:
    """Handles `--json` before the arguments are parsed, since a usage error must be a document, too."""
    own = arguments[: list(arguments).index("--")] if "--" in arguments else arguments
    if "--json" in own and own and own[0] in WITH_JSON:
        _json(True)


def options_of(name: str) -> list[click.Option]:
    """The options that every command has, and `--json` for those that have a document."""
    options = [
        _option(("-q", "--quiet"), lambda on: _quiet(on, name), "Print warnings and errors only."),
        _option(
            ("-v", "--verbose"),
            _verbose,
            "Print details on stderr: times of passes, the launcher's command (-vv: with the job of its ranks), tracebacks.",
            count=True,
        ),
    ]
    if name in WITH_JSON:
        options.append(_option(("--json",), _json, "Print the result, or the error, as one JSON document."))
    return options


def add_options(command: click.Command, name: str) -> None:
    """Adds these options to a command and its subcommands, except those that they define themselves."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_options(inner, name)
        return
    taken = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
    command.params.extend(option for option in options_of(name) if taken.isdisjoint(option.opts))


def _option(names: Sequence[str], act: Callable[[int], None], text: str, count: bool = False) -> click.Option:
    def called(ctx: click.Context, parameter: click.Parameter, times: int) -> None:
        if times and not ctx.resilient_parsing:
            act(times)

    kind = {"count": True} if count else {"is_flag": True}
    return click.Option(names, expose_value=False, is_eager=True, callback=called, help=text, **kind)


def _quiet(on: int, name: str) -> None:
    _mode.quiet = bool(on)
    if name not in _SHOWS_NOTHING_ELSE:
        _silence()


def _verbose(times: int) -> None:
    _mode.verbose = times


def _json(on: int) -> None:
    _mode.json = bool(on)
    _silence()


def _silence() -> None:
    """Discards all text that is printed to stdout from here on."""
    if _mode.stdout is None:
        _mode.stdout = sys.stdout
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (closed by `end`)
