"""The options of `data:` in a plan, or of `--data`: files, transforms of batches, and the handling of lengths.

    data: digits.npz                      a path: an .npz, a folder, or a .py file that defines `source`

    data:                                 or files for inputs, and options
      x: train-images-idx3-ubyte.gz
      label: train-labels-idx1-ubyte.gz
      transform: resize.py:to_32          a function of a dict of batch arrays that returns one

    data:                                 an input without records has one value for all of them
      source: digits.npz
      temperature: 0.5

    data:
      source: loader.py                   records or batches without names, or with other names than the inputs
      fields: [x, label]                  names in the order of a tuple's values; {label: target} of a mapping's keys

    data:
      source: corpus/                     a path, together with options; also with further `input: file`
      length: ids                         batches of records whose ids have similar lengths
      pad: {labels: -100}                 the number that pads a field, by default 0
      multiple: 8                         padded lengths are multiples of this
      buckets: [64, 256]                  bounds between lengths, by default quantiles
      window: 64                          the number of batches within which records of similar lengths are grouped

Paths are relative to the plan's folder, on the command line to the current one. A model input that has the name of an option comes from
a source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from partc.runtime.errors import UsageError
from partc.runtime.options import Options, Refused, refusal_lines, shown
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_serializer,
)

MULTIPLE = 8
WINDOW = 64
"""The number of batches within which records of similar lengths are grouped."""


def _is_value(value: object) -> bool:
    """Whether it is a number, a bool, or a list of such."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(map(_is_value, value))
    return isinstance(value, bool | int | float)


def _input(value: object) -> object:
    if (isinstance(value, str) and value) or _is_value(value):
        return value
    help = (
        f"write {{input: path}}, or for one that holds no records {{input: 0.5}}; the options are {', '.join(OPTIONS)}"
    )
    raise Refused(f"expected a path, or a value, but got {shown(value)}", help=help)


def _function(text: str) -> str:
    file, _, function = text.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise Refused(f"expected file.py:function, but got {shown(text)}", help="write file.py:function")
    return text


def _rising(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if any(later <= earlier for earlier, later in pairwise(lengths)):
        raise Refused(f"the lengths {list(lengths)} do not rise", help="write lengths that rise, such as [64, 256]")
    return lengths


_Text: TypeAlias = Annotated[str, Field(min_length=1)]
_Value: TypeAlias = str | bool | int | float | list[Any]


class Data(Options):
    """Where records come from, and what is done to them. Other keys are inputs: a file, or one value for all records."""

    model_config = ConfigDict(defer_build=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, PlainValidator(_input, json_schema_input_type=_Value)]]

    source: _Text | None = Field(None, description="A .npz, a folder, or a .py file that defines `source`.")
    transform: Annotated[str, AfterValidator(_function)] | None = Field(
        None, description="A function of a mapping of batch arrays that returns one: file.py:function."
    )
    fields: Annotated[tuple[_Text, ...], Field(strict=False)] | dict[str, _Text] = Field(
        (),
        description="Names of a record's values in their order, [x, label], or by input the key of a mapping: {label: target}.",
    )
    length: _Text | None = Field(None, description="The ragged field whose lengths make batches.")
    pad: dict[str, float] = Field({}, description="By ragged field the number that fills it up: {labels: -100}.")
    multiple: int = Field(MULTIPLE, ge=1, description="Padded lengths are multiples of this.")
    buckets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False), AfterValidator(_rising)] = Field(
        (), description="Bounds between lengths; without them quantiles."
    )
    window: int = Field(
        WINDOW, ge=1, description="Batches within which records of similar lengths are brought together."
    )

    @classmethod
    def contradictions(cls, said: Mapping[str, Any]) -> Iterator[Refused]:
        if all((name in OPTIONS and name != "source") or _is_value(value) for name, value in said.items()):
            yield Refused("it names no data", help="write source: path, or {input: path}")
        if "length" not in said and ("buckets" in said or "window" in said):
            fact = "`buckets` and `window` say how `length` makes batches, and there is no `length`"
            yield Refused(fact, help="write length: field")

    @model_serializer(mode="plain")
    def _as_in_plan(self) -> Any:
        said = {name: getattr(self, name) for name in OPTIONS if name in self.model_fields_set}
        found = {name: one for name, one in {**said, **(self.model_extra or {})}.items() if one is not None}
        return self.source if found == {"source": self.source} else found

    @property
    def files(self) -> dict[str, str]:
        """Maps each input to its file."""
        return {name: one for name, one in (self.model_extra or {}).items() if isinstance(one, str)}

    @property
    def values(self) -> dict[str, object]:
        """Maps inputs to one value for all records."""
        return {name: one for name, one in (self.model_extra or {}).items() if not isinstance(one, str)}

    def seen_from(self, base: Path) -> Data:
        """Returns the same data with its paths joined to the folder `base`."""
        own = {"source": self.source, "transform": self.transform}
        paths = {name: str(base / path) for name, path in {**own, **self.files}.items() if path}
        return self.model_copy(update=paths)

    def with_values(self, other: Data | None) -> Data:
        """Returns the same data, with the values of `other` for inputs that it does not name."""
        known = self.model_extra or {}
        return self.model_copy(update={k: one for k, one in (other.values if other else {}).items() if k not in known})


OPTIONS = (*Data.model_fields,)


def _mapping(said: object) -> object:
    """Returns the mapping that a single path stands for, `{source: path}`; a mapping is returned unchanged."""
    if isinstance(said, str | Path):
        return {"source": str(said)}
    if not isinstance(said, Mapping | Data) or said == {}:
        raise Refused(
            f"{said!r} is neither a path nor a mapping of inputs to paths", help="write a path, or {input: path}"
        )
    return said


DataForm: TypeAlias = Annotated[Data, BeforeValidator(_mapping, json_schema_input_type=str | Data)]


@dataclass(frozen=True)
class Spec:
    """The sources of records, with paths, as they are opened. `where` begins the messages about it."""

    source: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    """Maps inputs to one value for all records."""
    transform: str = ""
    """`file.py:function`; empty: none."""
    fields: tuple[str, ...] | Mapping[str, str] = ()
    """The names of a record's values in their order, or a map from each input to the key of its value in a record."""
    length: str = ""
    """The ragged field whose lengths make batches; empty: none."""
    pad: Mapping[str, float] = field(default_factory=dict)
    multiple: int = MULTIPLE
    buckets: tuple[int, ...] = ()
    window: int = WINDOW
    max_bytes: int | None = None
    """The most memory for data that is not memory-mapped; None: half of the memory. Set by the code that opens the data, not by a plan."""
    where: str = "data"

    @staticmethod
    def parse(said: object, base: Path = Path(), where: str = "data") -> Spec:
        """Returns the spec of a path or a mapping as YAML gives it; UsageError lists all that is wrong."""
        return Spec.of(_data(said, where).seen_from(base), where)

    @staticmethod
    def of(data: Data, where: str, max_bytes: int | None = None) -> Spec:
        """Returns the spec of a plan's or a command line's data."""
        return Spec(
            source=None if data.source is None else Path(data.source),
            files={name: Path(path) for name, path in data.files.items()},
            values=data.values,
            transform=data.transform or "",
            fields=data.fields,
            length=data.length or "",
            pad=data.pad,
            multiple=data.multiple,
            buckets=data.buckets,
            window=data.window,
            max_bytes=max_bytes,
            where=where,
        )


def data_of_words(words: Sequence[str], base: Path = Path(), where: str = "--data") -> Data:
    """Parses a command line's `--data` values: a path, `input=path` or `option=value` (`pad=labels:-100`); paths are joined to `base`.

    UsageError lists all that is wrong.
    """
    said: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or (base / word).exists():
            name, value = "source", word
        number = None if name in OPTIONS or (base / value).exists() else literal(value)
        if number is not None:
            said[name] = number
            continue
        if name in said and name != "pad":
            raise UsageError(f"{where}: '{name}' is given twice: {said[name]} and {value}")
        said[name] = _value(name, value, said.get(name))
    return _data(said, where).seen_from(base)


def _data(said: object, where: str) -> Data:
    try:
        return TypeAdapter[Data](DataForm).validate_python(said)
    except ValidationError as error:
        raise UsageError(refusal_lines(error, where)) from None


def _value(name: str, text: str, before: object) -> object:
    """Converts an option's text to the value that a plan would have; other texts stay as they are, for validation to refuse."""
    try:
        match name:
            case "multiple" | "window":
                return int(text)
            case "fields":
                pairs = [pair.partition(":") for pair in text.split(",")]
                return {name: key for name, _, key in pairs} if ":" in text else text.split(",")
            case "buckets":
                return [int(bound) for bound in text.split(",")]
            case "pad":
                fields = dict(pair.rsplit(":", 1) for pair in text.split(","))
                return {
                    **(before if isinstance(before, dict) else {}),
                    **{at: int(n) if n.lstrip("-").isdigit() else float(n) for at, n in fields.items()},
                }
    except ValueError:
        pass
    return text


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def literal(text: str) -> object:
    """Parses a number, a bool or a list of such; None for any other text."""
    try:
        found = json.loads(text)
        return found if _is_value(found) else None
    except (ValueError, RecursionError):
        return None
