"""The common part of all sources whose records are read by indices: each source implements `_read`, and inherits the rest.

The first records declare the fields. A field is ragged if `pad` or `length` names it, or if the lengths of the first records differ; it
then stays ragged, and no other field becomes ragged later.

A `datasets.Dataset`: records in arrow tables, mapped into memory and read by columns, a batch of indices at a time.

| column | field |
|---|---|
| numbers, bool | unchanged |
| a list of fixed size of numbers | records of that shape |
| a list of numbers | ragged if `pad` or `length` names it or lengths differ, else records of the lists' common length |
| text | text |
| any other (images, nested lists, structs) | the value to which `datasets` decodes it in the format numpy |

A dataset with a transform of its own (`set_transform`) is read through that transform.

Records of a user's object, read by an array of indices or one by one.

    class Digits:
        def __len__(self): return 60_000
        def __getitem__(self, indices):             # an array of indices: returns a dict of arrays, one row each, or a tuple of such
            return {"x": images[indices], "label": labels[indices]}

A ragged field is a list or an object array of arrays. A `__getitem__` that takes a single index and returns one record is accepted, too;
its records are then read one by one and stacked, at the cost of that many calls in Python. A `Dataset` of torch never gets an array of
indices, since its interface does not include that: its `__getitems__` gets a list of them, if it has one. Lengths of ragged fields are read
from `source.lengths`, a dict of arrays, if it exists; else every record is read once at the start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.units import first_of

from ...errors import UsageError
from ...user_code import UserCodeError, user_code
from ..fields import Field, Index, Ragged
from .naming import Naming, Unfit
from .values import field_values, stacked

Values: TypeAlias = Mapping[str, Array | Ragged]
_BLOCK = 1024
_NAMED = 4


class IndexedSource:
    """A source of `records` records. `ragged` names fields that are ragged even if a few records have the same length."""

    def __init__(self, where: str, records: int, ragged: Collection[str] = ()) -> None:
        self._where, self._records = where, records
        self.fields: dict[str, Field] = {}
        if records:
            try:
                self.fields = _declared(
                    self._read(np.array([0, min(1, records - 1), records - 1]), None), ragged, where
                )
            except Unfit as error:
                raise UsageError(f"{where}: {error}") from None

    def __len__(self) -> int:
        return self._records

    def _read(self, indices: Index, names: Collection[str] | None) -> Values:
        """Reads the named fields of these records, or all fields if `names` is None; `Unfit` where the result is not as requested."""
        raise NotImplementedError

    def take(self, indices: Index, names: Collection[str]) -> dict[str, Array | Ragged]:
        """Returns the named fields of these records."""
        try:
            return _as_declared(self._read(indices, names), self.fields, self._where)
        except Unfit as error:
            raise UsageError(f"{self._where}: {error}, {numbered(indices)}") from None

    def lengths(self, names: Sequence[str]) -> dict[str, Index]:
        """Maps each of these ragged fields to the lengths of all its records; reads each record once."""
        blocks: dict[str, list[Index]] = {name: [] for name in names}
        for begin in range(0, self._records if names else 0, _BLOCK):
            block = self.take(np.arange(begin, min(begin + _BLOCK, self._records)), names)
            for name in names:
                blocks[name].append(cast(Ragged, block[name]).lengths)
        return {name: np.concatenate(parts) for name, parts in blocks.items()}


def _declared(first: Values, ragged: Collection[str], where: str) -> dict[str, Field]:
    """Returns the fields that these first records declare."""
    flat = [name for name, value in first.items() if name in ragged and isinstance(value, np.ndarray)]
    if single := [name for name in flat if cast(Array, first[name]).ndim < 2]:
        raise UsageError(f"{where}: records of '{single[0]}' are single values and have no length")
    return {
        name: Field(value.flat.dtype, value.flat.shape[1:], ragged=True)
        if isinstance(value, Ragged)
        else Field(value.dtype, value.shape[2 if name in ragged else 1 :], name in ragged)
        for name, value in first.items()
    }


def _as_declared(found: Values, fields: Mapping[str, Field], where: str) -> dict[str, Array | Ragged]:
    """Returns the values of some records, ragged where declared so; UsageError where lengths differ in a field that is not ragged."""
    values = dict(found)
    for name, value in found.items():
        wanted = fields[name].ragged
        if isinstance(value, Ragged) and not wanted:
            raise UsageError(
                f"{where}: records of '{name}' have unequal lengths, "
                f"{value.lengths.min()} to {value.lengths.max()}\n  help: say what fills them up: pad: {{{name}: 0}}"
            )
        if wanted and not isinstance(value, Ragged):
            values[name] = Ragged.of(list(value))
    return values


def numbered(indices: Index) -> str:
    """Returns a list of record numbers for messages; of a long list only the first ones."""
    return f"record{'s' if len(indices) != 1 else ''} {first_of([*map(str, indices)], _NAMED)}"


class ArrowSource(IndexedSource):
    """The columns of a dataset as fields. `ragged` names fields that are ragged even if a few records have the same length."""

    def __init__(self, dataset: Any, where: str, naming: Naming, ragged: Collection[str] = ()) -> None:
        self._naming, self._ragged = naming, ragged
        shown = dataset.format
        columns = [str(name) for name in shown["columns"] or dataset.column_names]
        self._custom = dataset if shown["type"] == "custom" else None
        self._arrow = dataset if self._custom else dataset.with_format("arrow", columns=columns)
        self._decoded = dataset if self._custom else dataset.with_format("numpy", columns=columns)
        try:
            keys = naming.of({name: name for name in columns}, "a record") if self._custom is None else {}
        except Unfit as error:
            raise UsageError(f"{where}: {error}") from None
        self._keys = {name: str(key) for name, key in keys.items()}
        super().__init__(where, len(dataset), ragged)

    def _read(self, indices: Index, names: Collection[str] | None) -> Values:
        with user_code(self._where, f"reading {len(indices)} records of its dataset"):
            if self._custom is not None:
                return self._of_transform(self._custom[indices.tolist()], names)
            wanted = {name: self._keys[name] for name in names or self._keys}
            table = self._arrow[indices]
            fields: dict[str, Array | Ragged] = {}
            left = {}
            for name, key in wanted.items():
                value = self._column(table.column(key).combine_chunks(), name)
                if value is None:
                    left[name] = key
                else:
                    fields[name] = value
            if left:
                decoded = self._decoded.with_format("numpy", columns=list(left.values()))[indices]
                fields |= {name: field_values(decoded[key]) for name, key in left.items()}
            return {name: fields[name] for name in wanted}

    def _of_transform(self, given: object, names: Collection[str] | None) -> Values:
        assert isinstance(given, Mapping)
        fields = self._naming.of(given, "a batch")
        return {name: field_values(fields[name]) for name in names or fields}

    def _column(self, column: Any, name: str) -> Array | Ragged | None:
        """Converts an arrow column to a field, in new memory; None where `datasets` must decode it."""
        import pyarrow

        column = column.chunk(0) if isinstance(column, pyarrow.ChunkedArray) else column
        kind, kinds = column.type, pyarrow.types
        if column.null_count:
            raise UsageError(
                f"{self._where}: column '{name}' has records without a value\n  help: filter or fill them: dataset.filter(...)"
            )
        if kinds.is_fixed_size_list(kind) and kinds.is_primitive(kind.value_type):
            return _own(column.flatten()).reshape(len(column), kind.list_size)
        if (kinds.is_list(kind) or kinds.is_large_list(kind)) and kinds.is_primitive(kind.value_type):
            lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
            flat = _own(column.flatten())
            if name not in self._ragged and len(set(lengths.tolist())) == 1:
                return flat.reshape(len(column), int(lengths[0]))
            return Ragged(flat, lengths)
        if kinds.is_string(kind) or kinds.is_large_string(kind):
            return np.array(column.to_pylist(), object)
        return _own(column) if kinds.is_primitive(kind) else None


def _own(column: Any) -> Array:
    """Returns an arrow column of numbers as an array that may be written to."""
    array: Array = column.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


class _Records(Protocol):
    """The object that a user's file defines."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Index | int) -> object: ...


class CodeSource(IndexedSource):
    """Records of a user's object. `ragged` names fields that are ragged even if a few records have the same length."""

    def __init__(
        self,
        user_object: object,
        where: str,
        ragged: Collection[str] = (),
        naming: Naming | None = None,
        one_by_one: bool = False,
    ) -> None:
        self._where, self._naming, self._object = where, naming or Naming(), cast(_Records, user_object)
        self._single: bool | None = one_by_one or None
        """Whether records are read one by one; None before the first read."""
        self._of_list = getattr(user_object, "__getitems__", None) if one_by_one else None
        with user_code(where, "asking for the number of records"):
            records = len(self._object)
        super().__init__(where, records, ragged)

    def lengths(self, names: Sequence[str]) -> dict[str, Index]:
        """Maps each of these ragged fields to the lengths of all its records: from the object if it has them, else by reading them."""
        with user_code(self._where, "asking for the lengths of its fields"):
            told = getattr(self._object, "lengths", {})
            found = {name: np.asarray(told[name], np.int64) for name in names if name in told}
        left = [name for name in names if name not in found]
        return found | super().lengths(left)

    def _read(self, indices: Index, names: Collection[str] | None) -> Values:
        """Reads records by an array of indices or, if that fails at the first read, one by one; later reads do the same as the first."""
        if self._single is not None:
            return self._by_index(indices, names) if self._single else self._by_array(indices, names)
        # the first read has several indices, because int() and other functions accept an array of one element as a number
        try:
            values, self._single = self._by_array(indices, names), False
            return values
        except (Unfit, UserCodeError) as error:
            if isinstance(error, UserCodeError) and not isinstance(error.__cause__, Exception):
                raise
            by_array = error
        try:
            values, self._single = self._by_index(indices, names), True
            return values
        except (Unfit, UserCodeError) as error:
            raise UsageError(
                f"{self._where}: its `source` cannot be read\n"
                f"  by an array of indices: {_fact(by_array)}\n  by one index: {_fact(error)}\n"
                "  help: `__getitem__` takes an array of indices and returns a dict of arrays, one row for each"
            ) from error

    def _by_array(self, indices: Index, names: Collection[str] | None) -> Values:
        with user_code(self._where, f"reading {numbered(indices)}"):
            return self._collated(self._object[indices], len(indices), names)

    def _by_index(self, indices: Index, names: Collection[str] | None) -> Values:
        if self._of_list is not None:
            with user_code(self._where, f"reading {numbered(indices)}"):
                return self._collated(list(self._of_list(indices.tolist())), len(indices), names)
        given = []
        for index in indices.tolist():
            with user_code(self._where, f"reading record {index}"):
                given.append(self._object[index])
        with user_code(self._where, f"reading {numbered(indices)}"):
            return self._collated(given, len(indices), names)

    def _collated(self, returned: object, count: int, names: Collection[str] | None) -> dict[str, Array | Ragged]:
        if isinstance(returned, list):
            records = [self._naming.of(record) for record in returned]
            wanted = names or records[0]
            missing = [name for name in wanted for record in records if name not in record]
            arrays = {} if missing else {name: stacked([record[name] for record in records]) for name in wanted}
        elif not isinstance(returned, Mapping | tuple) and not hasattr(returned, "shape"):
            raise Unfit(f"it returns a {type(returned).__name__}, not a dict of arrays")
        else:
            fields = self._naming.of(returned, "what it returns")
            missing = [name for name in names or fields if name not in fields]
            arrays = {} if missing else {str(name): field_values(fields[name]) for name in names or fields}
        if missing:
            raise Unfit(f"it returns no '{missing[0]}'")
        for name, value in arrays.items():
            rows = len(value.lengths) if isinstance(value, Ragged) else value.shape[0] if value.ndim else 0
            if rows != count:
                raise Unfit(f"its '{name}' has {rows} rows for {count} indices")
        return arrays


def _fact(error: Exception) -> str:
    return error.head if isinstance(error, UserCodeError) else str(error)
