"""A `datasets.Dataset`: records in arrow tables, mapped into memory and read by columns, a batch of indices at a time.

| column | field |
|---|---|
| numbers, bool | unchanged |
| a list of fixed size of numbers | records of that shape |
| a list of numbers | ragged if `pad` or `length` names it or lengths differ, else records of the lists' common length |
| text | text |
| any other (images, nested lists, structs) | the value to which `datasets` decodes it in the format numpy |

A dataset with a transform of its own (`set_transform`) is read through that transform.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ...errors import UsageError
from ...user_code import user_code
from ..fields import Index, Ragged
from .indexed import IndexedSource, Values
from .naming import Naming, Unfit
from .values import field_values


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
