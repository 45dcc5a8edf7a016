"""Records of a user's object, read by an array of indices or one by one.

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
from typing import Protocol, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ...errors import UsageError
from ...user_code import UserCodeError, user_code
from ..fields import Index, Ragged
from .indexed import IndexedSource, Values, numbered
from .naming import Naming, Unfit
from .values import field_values, stacked


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
