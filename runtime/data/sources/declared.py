"""Fields as the first records have declared them: what every source that reads records by indices does alike.

A field is ragged where `pad` or `length` names it, or where the first records differ; then it stays ragged, and no other becomes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.units import first_of

from ...errors import UsageError
from ..fields import Field, Index, Ragged

Take: TypeAlias = Callable[[Index, Collection[str]], Mapping[str, Array | Ragged]]
_BLOCK = 1024
_NAMED = 4


def declared(first: Mapping[str, Array | Ragged], ragged: Collection[str], where: str) -> dict[str, Field]:
    """The fields of which these are some records."""
    flat = [name for name, value in first.items() if name in ragged and isinstance(value, np.ndarray)]
    if single := [name for name in flat if cast(Array, first[name]).ndim < 2]:
        raise UsageError(f"{where}: records of '{single[0]}' are single values and have no length")
    return {
        name: Field(value.flat.dtype, value.flat.shape[1:], ragged=True)
        if isinstance(value, Ragged)
        else Field(value.dtype, value.shape[2 if name in ragged else 1 :], name in ragged)
        for name, value in first.items()
    }


def as_declared(
    found: Mapping[str, Array | Ragged], fields: Mapping[str, Field], where: str
) -> dict[str, Array | Ragged]:
    """The values of some records; UsageError where they have unequal lengths and nothing says what fills them up."""
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


def lengths_by_reading(take: Take, records: int, names: Sequence[str]) -> dict[str, Index]:
    """The lengths of all records, by ragged field: each is read once."""
    blocks: dict[str, list[Index]] = {name: [] for name in names}
    for begin in range(0, records if names else 0, _BLOCK):
        block = take(np.arange(begin, min(begin + _BLOCK, records)), names)
        for name in names:
            blocks[name].append(cast(Ragged, block[name]).lengths)
    return {name: np.concatenate(parts) for name, parts in blocks.items()}


def numbered(indices: Index) -> str:
    """Records by their numbers, of many the first ones."""
    return f"record{'s' if len(indices) != 1 else ''} {first_of([*map(str, indices)], _NAMED)}"
