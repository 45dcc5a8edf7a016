"""The common part of all sources whose records are read by indices: each source implements `_read`, and inherits the rest.

The first records declare the fields. A field is ragged if `pad` or `length` names it, or if the lengths of the first records differ; it
then stays ragged, and no other field becomes ragged later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.units import first_of

from ...errors import UsageError
from ..fields import Field, Index, Ragged
from .naming import Unfit

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
