"""Python files of the user: a `source` of records, and functions that transform a batch.

    class Digits:                                        source = Digits(), or def source(): return Digits()
        def __len__(self): return 60_000
        def __getitem__(self, indices):                  an array of indices: a dict of arrays, one row each
            return {"x": images[indices], "label": labels[indices]}

A ragged field is a list or an object array of arrays. A `__getitem__` that takes a single index and returns one record is taken
too; its records are then read one by one and put together, which costs what Python's calls cost. Lengths of ragged fields are
`source.lengths`, a dict of arrays, where it has one; else every record is read once at the start.

    def to_32(batch): return {"x": resize(batch["x"]), "label": batch["label"]}
    def augmented(batch, generator): ...                 with an np.random.Generator of its own for each batch

What a file or one of its functions raises becomes a user's error (`user_code.py`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeAlias, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..errors import PartcError, UsageError
from ..user_code import UserCodeError, run_file, user_code
from .fields import Field, Index, Ragged

Batch: TypeAlias = dict[str, Array]
_BLOCK = 1024
_NAMED = 4


@dataclass
class Code:
    """The files that have run, each once for a rank: a source, a transform and a schedule of one file share its globals.

    Where ranks are threads each has its own globals, as it has in a process of its own: a generator or a counter there gives the
    same numbers.
    """

    ran: dict[Path, ModuleType | Exception] = field(default_factory=dict)

    def prepare(self, path: Path) -> None:
        """Runs a file now; what it raises is raised where something of it is asked for."""
        with contextlib.suppress(Exception):
            self.module(path)

    def module(self, path: Path) -> ModuleType:
        """The module of a file, run at the first call; UserCodeError where it failed."""
        path = path.resolve()
        if path not in self.ran:
            try:
                self.ran[path] = run_file(path)
            except Exception as error:
                self.ran[path] = error
        found = self.ran[path]
        if isinstance(found, Exception):
            raise found
        return found

    def value(self, path: Path, name: str) -> object:
        """What a file binds to a name; UsageError where it binds nothing, UserCodeError where it fails."""
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file")
        path, module = path.resolve(), self.module(path)
        if not hasattr(module, name):
            raise UsageError(f"{path}: it does not define `{name}`")
        return getattr(module, name)


class _Unfit(PartcError):
    """What the user's code gave is not what was asked for."""


class _Records(Protocol):
    """What a user's file defines."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Index | int) -> object: ...


class CodeSource:
    """Records of a user's object. `ragged` names fields that are ragged even where a few records have one length."""

    def __init__(self, found: object, where: str, ragged: Collection[str] = ()) -> None:
        made = inspect.isfunction(found) or inspect.isclass(found)
        self._where = where
        with user_code(where, "making its `source`"):
            self._object = cast(_Records, cast("Callable[[], object]", found)() if made else found)
            lacks = not hasattr(self._object, "__len__") or not hasattr(self._object, "__getitem__")
        if lacks:
            raise UsageError(
                f"{where}: its `source` is a {type(self._object).__name__} without `__len__` or `__getitem__`\n"
                "  help: define both; `__getitem__` takes an array of indices and returns a dict of arrays"
            )
        with user_code(where, "asking for the number of records"):
            self._records = len(self._object)
        self._single = False
        self.fields: dict[str, Field] = {}
        if self._records:
            first = self._probe()
            self.fields = {name: _field(value, name in ragged) for name, value in first.items()}
            flat = [name for name, value in first.items() if name in ragged and isinstance(value, np.ndarray)]
            if single := [name for name in flat if cast(Array, first[name]).ndim < 2]:
                raise UsageError(f"{where}: records of '{single[0]}' are single values and have no length")

    def __len__(self) -> int:
        return self._records

    def take(self, indices: Index, names: Collection[str]) -> dict[str, Array | Ragged]:
        """The named fields of these records."""
        try:
            found = self._read(indices, names)
        except _Unfit as error:
            raise UsageError(f"{self._where}: {error}, {_records(indices)}") from None
        for name, value in found.items():
            wanted = self.fields[name].ragged
            if isinstance(value, Ragged) and not wanted:
                raise UsageError(
                    f"{self._where}: records of '{name}' have unequal lengths, "
                    f"{value.lengths.min()} to {value.lengths.max()}\n  help: say what fills them up: pad: {{{name}: 0}}"
                )
            if wanted and not isinstance(value, Ragged):
                found[name] = Ragged.of(list(value))
        return found

    def lengths(self, names: Sequence[str]) -> dict[str, Index]:
        """The lengths of all records, by ragged field."""
        with user_code(self._where, "asking for the lengths of its fields"):
            told = getattr(self._object, "lengths", {})
            found = {name: np.asarray(told[name], np.int64) for name in names if name in told}
        left = [name for name in names if name not in found]
        blocks: dict[str, list[Index]] = {name: [] for name in left}
        for begin in range(0, self._records if left else 0, _BLOCK):
            block = self.take(np.arange(begin, min(begin + _BLOCK, self._records)), left)
            for name in left:
                blocks[name].append(cast(Ragged, block[name]).lengths)
        return found | {name: np.concatenate(parts) for name, parts in blocks.items()}

    def _probe(self) -> dict[str, Array | Ragged]:
        """Two records, read by an array of indices or else one by one, which is kept in mind."""
        # two, because int() and many more take an array of one element for a number
        indices = np.array([0, self._records - 1])
        try:
            return self._read(indices, None)
        except (_Unfit, UserCodeError) as error:
            if isinstance(error, UserCodeError) and not isinstance(error.__cause__, Exception):
                raise
            by_array = error
        self._single = True
        try:
            return self._read(indices, None)
        except (_Unfit, UserCodeError) as error:
            raise UsageError(
                f"{self._where}: its `source` cannot be read\n"
                f"  by an array of indices: {_fact(by_array)}\n  by one index: {_fact(error)}\n"
                "  help: `__getitem__` takes an array of indices and returns a dict of arrays, one row for each"
            ) from error

    def _read(self, indices: Index, names: Collection[str] | None) -> dict[str, Array | Ragged]:
        """The fields of these records, as the object takes indices; `_Unfit` where it gives something else."""
        if not self._single:
            with user_code(self._where, f"reading {_records(indices)}"):
                return self._collated(self._object[indices], len(indices), names)
        given = []
        for index in indices.tolist():
            with user_code(self._where, f"reading record {index}"):
                given.append(self._object[index])
        with user_code(self._where, f"reading {_records(indices)}"):
            return self._collated(given, len(indices), names)

    def _collated(self, given: object, count: int, names: Collection[str] | None) -> dict[str, Array | Ragged]:
        if isinstance(given, list):
            records = cast("list[Mapping[str, object]]", given)
            if not all(isinstance(record, Mapping) for record in records):
                raise _Unfit(f"a record is a {type(records[0]).__name__}, not a dict")
            missing = [name for name in names or records[0] for record in records if name not in record]
            if not missing:
                fields = {name: [np.asarray(record[name]) for record in records] for name in names or records[0]}
        elif isinstance(given, Mapping):
            missing = [name for name in names or given if name not in given]
            if not missing:
                fields = {str(name): given[name] for name in names or given}
        else:
            raise _Unfit(f"it returns a {type(given).__name__}, not a dict of arrays")
        if missing:
            raise _Unfit(f"it returns no '{missing[0]}'")
        found = {name: _values(value) for name, value in fields.items()}
        for name, value in found.items():
            rows = len(value.lengths) if isinstance(value, Ragged) else value.shape[0] if value.ndim else 0
            if rows != count:
                raise _Unfit(f"its '{name}' has {rows} rows for {count} indices")
        return found


def _values(given: object) -> Array | Ragged:
    """A field of a batch: one array, or ragged where its records are arrays of unequal lengths."""
    if isinstance(given, list) or (isinstance(given, np.ndarray) and given.dtype == object and given.ndim == 1):
        records = [np.asarray(record) for record in given]
        if any(isinstance(record, str | bytes) for record in given[:1]):
            return np.array(given, object)
        if len({record.shape for record in records}) > 1:
            return Ragged.of(records)
        return np.stack(records)
    return np.asarray(given)


def _field(value: Array | Ragged, ragged: bool) -> Field:
    if isinstance(value, Ragged):
        return Field(value.flat.dtype, value.flat.shape[1:], ragged=True)
    return Field(value.dtype, value.shape[2:] if ragged else value.shape[1:], ragged)


def _fact(error: Exception) -> str:
    return error.head if isinstance(error, UserCodeError) else str(error)


def _records(indices: Index) -> str:
    """Records by their numbers, of many the first ones."""
    named = ", ".join(map(str, indices[:_NAMED].tolist()))
    more = f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
    return f"record{'s' if len(indices) != 1 else ''} {named}{more}"


@dataclass(frozen=True)
class Transform:
    """A user's function on batches; `random` where it takes a generator as well."""

    function: Callable[..., object]
    random: bool
    where: str

    @staticmethod
    def load(spec: str, code: Code) -> Transform:
        """The transform that `file.py:function` names; UsageError where there is none."""
        file, _, name = spec.rpartition(":")
        function = code.value(Path(file), name)
        if not callable(function):
            raise UsageError(f"{file}: `{name}` is a {type(function).__name__}, not a function")
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):  # what is written in C may have none
            parameters = []
        taken = [one for one in parameters if one.kind in kinds]
        random = any(one.default is inspect.Parameter.empty or one.name == "generator" for one in taken[1:2])
        return Transform(function, random, spec)

    def __call__(self, batch: Mapping[str, Array], rows: int, generator: np.random.Generator | None) -> Batch:
        """The arrays that the function makes of a batch; UsageError where they are not its rows."""
        with user_code(self.where, f"transforming a batch of {rows} records"):
            made = self.function(dict(batch), generator) if self.random else self.function(dict(batch))
            found = (
                {str(name): np.asarray(value) for name, value in made.items()} if isinstance(made, Mapping) else None
            )
        if found is None:
            raise UsageError(f"{self.where} returns a {type(made).__name__}; it must return a dict of arrays")
        problems = [
            f"{self.where}: '{name}' is {list(value.shape)} for {rows} records\n  help: its first dim counts records"
            for name, value in found.items()
            if not value.ndim or len(value) != rows
        ]
        if problems:
            raise UsageError("\n".join(problems))
        return found
