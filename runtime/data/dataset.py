"""All fields of all records of a spec: opened, and read by indices into padded arrays.

Every field has the same number of records. The true lengths of a ragged field `ids` are a field as well, `ids.length`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.artifact.training.data_spec import Spec

from ..errors import UsageError
from ..user_code import user_code
from .code import Batch, Code, Transform
from .fields import Column, Field, Index, Ragged, RaggedRows, Rows
from .files import OFFSETS, open_field, open_fields
from .memory import Memory
from .sampler import Buckets
from .sources.indexed import ArrowSource, CodeSource
from .sources.naming import Naming, Unfit
from .sources.user_source import STREAMS, Kind, UserSource, user_source
from .sources.values import as_array

LENGTH = ".length"


class Source(Protocol):
    """A source of all records, with some of the spec's fields."""

    fields: dict[str, Field]

    def __len__(self) -> int: ...

    def take(self, indices: Index, names: Collection[str]) -> dict[str, Array | Ragged]:
        """Returns the named fields of these records, in new memory."""
        ...

    def lengths(self, names: list[str]) -> dict[str, Index]:
        """Maps each of these ragged fields to the lengths of all its records."""
        ...


class FileSource:
    """Fields in one file or folder."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self.fields = {name: column.field for name, column in columns.items()}

    def __len__(self) -> int:
        return min((len(column) for column in self._columns.values()), default=0)

    def counts(self) -> dict[str, int]:
        """Maps each field to its number of records."""
        return {name: len(column) for name, column in self._columns.items()}

    def take(self, indices: Index, names: Collection[str]) -> dict[str, Array | Ragged]:
        """Returns the named fields of these records."""
        return {name: self._columns[name].take(indices) for name in names}

    def lengths(self, names: list[str]) -> dict[str, Index]:
        """Maps each of these ragged fields to the lengths of all its records."""
        return {name: column.lengths for name in names if isinstance(column := self._columns[name], RaggedRows)}


@dataclass
class Dataset:
    """Records with their fields, and the transform of batches."""

    spec: Spec
    records: int
    sources: list[Source]
    transform: Transform | None = None
    fields: dict[str, Field] = field(init=False)
    _lengths: dict[str, Index] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.fields = {name: one for source in self.sources for name, one in source.fields.items()}
        lengths = [name + LENGTH for name, one in self.fields.items() if one.ragged]
        self.fields |= {name: Field(np.dtype(np.int64), ()) for name in lengths if name not in self.fields}

    def ragged(self, names: Collection[str]) -> list[str]:
        """Returns those of the named fields that are ragged."""
        return [name for name in names if self.fields[name].ragged]

    def lengths(self, name: str) -> Index:
        """Returns the lengths of all records of a ragged field."""
        if name not in self._lengths:
            source = next(source for source in self.sources if name in source.fields)
            self._lengths |= source.lengths(self.ragged(source.fields))
        return self._lengths[name]

    def buckets(self) -> Buckets | None:
        """Returns the buckets that group records of similar length, if the spec has `length`, else None."""
        if not self.spec.length:
            return None
        return Buckets.of(self.lengths(self.spec.length), self.spec.buckets, self.spec.window)

    def take(self, indices: Index, names: Collection[str], padded_lengths: Mapping[str, int]) -> Batch:
        """Returns the named fields of these records, with ragged ones padded to `padded_lengths`."""
        batch: Batch = {}
        for source in self.sources:
            mine = [name for name in names if name in source.fields]
            for name, value in source.take(indices, mine).items() if mine else ():
                if isinstance(value, Ragged):
                    value = value.padded(padded_lengths[name], self.spec.pad.get(name, 0))
                batch[name] = value
        for name in names:
            if name not in batch:
                batch[name] = self.lengths(name.removesuffix(LENGTH))[indices]
        return batch


def open_data(
    spec: Spec,
    apart: Collection[str] = (),
    code: Code | None = None,
    user: UserSource | None = None,
    inputs: Collection[str] = (),
) -> Dataset:
    """Opens the records of a spec without the fields in `apart`; UsageError lists all problems before any record is used.

    `user`: the source of the spec's Python file, if it was loaded before. `inputs`: the names for values of records that have no names.
    """
    spec = replace(spec, files={name: path for name, path in spec.files.items() if name not in apart})
    code, memory, problems = code or Code(), Memory(spec.max_bytes), list[str]()
    sources: list[Source] = []
    counts: dict[str, int] = {}
    try:
        if spec.source is not None and spec.source.suffix == ".py":
            user = user or user_source(code.value(spec.source, "source"), str(spec.source), None, 0)
        if user is not None:
            records = _of_user(user, spec, Naming(spec.fields, () if spec.transform else tuple(inputs)))
            own = records.counts() if isinstance(records, FileSource) else dict.fromkeys(records.fields, len(records))
            counts |= own or {"source": len(records)}
            sources.append(records)
        elif spec.source is not None:
            columns = FileSource(open_fields(spec.source, apart, memory))
            counts |= columns.counts()
            sources.append(columns)
    except UsageError as error:
        problems.append(str(error))
    for name, path in spec.files.items():
        if name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in spec.files:
            continue
        try:
            if name in counts:
                raise UsageError(f"{path}: '{name}' is already given by {spec.source}")
            columns = FileSource({name: open_field(name, path, spec.files.get(name + OFFSETS), memory)})
            counts |= columns.counts()
            sources.append(columns)
        except UsageError as error:
            problems.append(str(error))
    transform = None
    if spec.transform:
        try:
            transform = Transform.load(spec.transform, code)
        except UsageError as error:
            problems.append(f"transform: {error}")
    if not problems:
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"'{name}' has {count}" for name, count in counts.items())
            fact = f"its fields differ in the number of records: {listed}"
            problems.append(f"{fact}\n  help: record i of all fields belongs together")
        problems += _unknown_files(spec, {name: one for source in sources for name, one in source.fields.items()})
    if problems:
        raise UsageError("\n".join(f"{spec.where}: {problem}" for problem in problems))
    return Dataset(spec, min(counts.values(), default=0), sources, transform)


def _of_user(source: UserSource, spec: Spec, naming: Naming) -> Source:
    """Opens the records of a user's object by the access that the object offers."""
    ragged = {*spec.pad, *([spec.length] if spec.length else [])}
    match source.kind:
        case Kind.ARROW:
            return ArrowSource(source.value, source.where, naming, ragged)
        case Kind.COLUMNS:
            return _of_columns(source, naming)
        case kind if kind in STREAMS:
            raise UsageError(f"{source.where}: its `source` is a {type(source.value).__name__}, which has no index")
        case kind:
            return CodeSource(source.value, source.where, ragged, naming, one_by_one=kind is Kind.ONE_BY_ONE)


def _of_columns(source: UserSource, naming: Naming) -> FileSource:
    """Opens a mapping of arrays or a dataset of tensors as full columns, which are not copied."""
    value = source.value
    try:
        named = naming.of(value if isinstance(value, Mapping) else tuple(value.tensors), "its `source`")
        columns: dict[str, Column] = {}
        for name, one in named.items():
            with user_code(source.where, f"taking its array '{name}'"):
                array = as_array(one)
            columns[name] = Rows(array)
    except Unfit as error:
        raise UsageError(f"{source.where}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{source.where}: '{name}': {error}") from None
    return FileSource(columns)


def _unknown_files(spec: Spec, fields: Mapping[str, Field]) -> list[str]:
    """Returns a problem for each option that names an unknown field or one of the wrong kind."""
    ragged = ", ".join(f"'{name}'" for name, one in fields.items() if one.ragged) or "none"
    problems = []
    for option, names in (("length", [spec.length] if spec.length else []), ("pad", list(spec.pad))):
        for name in names:
            if name not in fields:
                problems.append(f"{option}: there is no field '{name}'; the ragged ones are {ragged}")
            elif not fields[name].ragged:
                problems.append(f"{option}: '{name}' is not ragged, {fields[name]}; the ragged ones are {ragged}")
    for name, value in spec.pad.items():
        if name in fields and fields[name].dtype.kind in "iu":
            law = np.iinfo(fields[name].dtype.name)
            if int(value) != value or not law.min <= value <= law.max:
                problems.append(f"pad: '{name}' is {fields[name].dtype}, which cannot be {value}")
    return problems
