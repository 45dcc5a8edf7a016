"""What `data:` of a plan or `--data` says: files, what is done to a batch of them, and how lengths are handled.

    data: digits.npz                      a path: an .npz, a folder, or a .py file that defines `source`

    data:                                 or files for inputs, and options
      x: train-images-idx3-ubyte.gz
      label: train-labels-idx1-ubyte.gz
      transform: resize.py:to_32          a function of a dict of batch arrays that returns one

    data:                                 an input that holds no records has one value for all of them
      source: digits.npz
      temperature: 0.5

    data:
      source: corpus/                     a path, where there are options; also with further `input: file`
      length: ids                         batches of records whose ids have similar lengths
      pad: {labels: -100}                 what fills a field up, 0 where nothing is said
      multiple: 8                         padded lengths are multiples of this
      buckets: [64, 256]                  bounds between lengths; quantiles where nothing is said
      window: 64                          the batches within which records are brought together

Paths are relative to the plan's folder, on the command line to the current one. A model input whose name is one of these words
comes from a source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ..errors import UsageError

_WORDS = ("source", "transform", "length")
MULTIPLE = 8
WINDOW = 64
"""Batches within which records of similar lengths are brought together."""


@dataclass(frozen=True)
class Spec:
    """Where records come from. `where` begins the messages about it."""

    source: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    """By input one value for all records."""
    transform: str = ""
    """`file.py:function`; empty: none."""
    length: str = ""
    """The ragged field whose lengths make batches; empty: none."""
    pad: Mapping[str, float] = field(default_factory=dict)
    multiple: int = MULTIPLE
    buckets: tuple[int, ...] = ()
    window: int = WINDOW
    max_bytes: int | None = None
    """The memory that what is not mapped may take; None: half of what there is. No plan says it, only who opens the data."""
    where: str = "data"

    @staticmethod
    def parse(said: object, base: Path = Path(), where: str = "data") -> Spec:
        """The spec of a path or a mapping as YAML gives it; UsageError with all that is wrong."""
        if isinstance(said, str | Path):
            return Spec(base / said, where=where)
        problems = data_problems(said)
        if problems or not isinstance(said, Mapping):
            raise UsageError("\n".join(f"{where}: {fact}\n  help: {help}" for fact, help in problems))
        options = {name: said[name] for name in ("length", "multiple", "window") if name in said}
        return Spec(
            source=base / said["source"] if "source" in said else None,
            files={str(name): base / path for name, path in said.items() if name not in _LAWS and _is_text(path)},
            values={str(name): value for name, value in said.items() if name not in _LAWS and not _is_text(value)},
            transform=str(base / said["transform"]) if "transform" in said else "",
            pad=dict(said.get("pad", {})),
            buckets=tuple(said.get("buckets", ())),
            where=where,
            **options,
        )

    @staticmethod
    def of_words(words: Sequence[str], base: Path = Path(), where: str = "--data") -> Spec:
        """The spec of a command line's `--data` values: a path, `input=path` and `option=value` (`pad=labels:-100`)."""
        said: dict[str, object] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or (base / word).exists():
                name, value = "source", word
            number = None if name in _LAWS or (base / value).exists() else literal(value)
            if number is not None:
                said[name] = number
                continue
            if name in said and name != "pad":
                raise UsageError(f"{where}: '{name}' is given twice: {said[name]} and {value}")
            said[name] = _value(name, value, said.get(name))
        return Spec.parse(said, base, where)


def data_problems(said: object) -> list[tuple[str, str]]:
    """All that is wrong with what a plan, a manifest or a command line says of data, each with its remedy."""
    if isinstance(said, str | Path):
        return []
    if not isinstance(said, Mapping) or not said:
        return [(f"{said!r} is neither a path nor a mapping of inputs to paths", "write a path, or {input: path}")]
    return list(_problems(said))


def _value(name: str, text: str, before: object) -> object:
    """An option's text as a plan would say it; what cannot be read stays text, and the laws refuse it."""
    try:
        match name:
            case "multiple" | "window":
                return int(text)
            case "buckets":
                return [int(bound) for bound in text.split(",")]
            case "pad":
                fields = dict(pair.rsplit(":", 1) for pair in text.split(","))
                return {**(before if isinstance(before, dict) else {}), **{at: _number(n) for at, n in fields.items()}}
    except ValueError:
        pass
    return text


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_counts(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(_is_count, value)):
        return False
    return all(lower < upper for lower, upper in pairwise(value))


def _are_numbers(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in value.values()
    )


def _is_function(value: object) -> bool:
    file, _, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return file.endswith(".py") and function.isidentifier()


def _is_text(value: object) -> bool:
    return isinstance(value, str | Path) and bool(value)


def _is_value(value: object) -> bool:
    """Whether it is a number, a bool, or a list of such."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(map(_is_value, value))
    return isinstance(value, bool | int | float)


def literal(text: str) -> object:
    """The number, bool or list of such that a text says; None where it says none."""
    try:
        found = json.loads(text)
        return found if _is_value(found) else None
    except (ValueError, RecursionError):
        return None


_LAWS = {
    "source": (_is_text, "a path"),
    "transform": (_is_function, "file.py:function"),
    "length": (_is_text, "the name of a field"),
    "pad": (_are_numbers, "numbers by field, such as {labels: -100}"),
    "multiple": (_is_count, "a whole number of at least 1"),
    "buckets": (_are_counts, "lengths that rise, such as [64, 256]"),
    "window": (_is_count, "a whole number of at least 1"),
}


def _problems(said: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    for name, value in said.items():
        if isinstance(name, str) and name in _LAWS:
            holds, law = _LAWS[name]
            if not holds(value):
                yield f"{name} is {value!r}", f"write {law}"
        elif not isinstance(name, str) or not (_is_text(value) or _is_value(value)):
            options = ", ".join(_LAWS)
            help = f"write {{input: path}}, or for one that holds no records {{input: 0.5}}; the options are {options}"
            yield f"{name} is {value!r}", help
    if all((name in _LAWS and name != "source") or _is_value(value) for name, value in said.items()):
        yield "it names no data", "write source: path, or {input: path}"
    if "length" not in said and ("buckets" in said or "window" in said):
        yield "`buckets` and `window` say how `length` makes batches, and there is no `length`", "write length: field"
