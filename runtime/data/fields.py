"""One field of all records, read by all indices of a batch at once.

A batch is one `take` along the first axis of an array in memory or mapped from a file, never a loop over records. Records are read as rows
of bytes: an array in a file may begin at an odd address or have another byte order, and numpy would first make an aligned copy of the full
array in native byte order.

    Rows(np.arange(6).reshape(3, 2)).take(np.array([2, 0]))  ->  [[4, 5], [0, 1]]
    Joined([Rows(first), Rows(second)])                      the records of both, in their order
    RaggedRows(Rows(np.arange(5)), np.array([0, 2, 2, 5]))   records [0, 1], [] and [2, 3, 4]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Array

Index: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Field:
    """The type and shape of a field's records. Ragged records have an additional first dim of varying size, which `shape` omits."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    ragged: bool = False

    def __str__(self) -> str:
        dims = ["*"] * self.ragged + [str(dim) for dim in self.shape]
        return f"{self.dtype.name} [{', '.join(dims)}]"


@dataclass(frozen=True)
class Ragged:
    """A batch of records of unequal lengths, concatenated."""

    flat: Array
    lengths: Index

    @staticmethod
    def of(records: Sequence[Array]) -> Ragged:
        """Concatenates records, at least one, that are equal in all dims but the first; ValueError where they are not."""
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        return Ragged(np.concatenate(records), lengths)

    def padded(self, width: int, value: float) -> Array:
        """Returns one array with each record padded to `width`, which is at least the longest length."""
        shape = (len(self.lengths), width, *self.flat.shape[1:])
        made = np.full(shape, value, self.flat.dtype)
        made[np.arange(width) < self.lengths[:, None]] = self.flat
        return made


class Column(Protocol):
    """A field that can be read by indices."""

    field: Field

    def __len__(self) -> int: ...

    def take(self, indices: Index) -> Array | Ragged:
        """Returns the records of these indices, in their order, in new memory."""
        ...


class Rows:
    """The records of an array, whose first axis counts them."""

    def __init__(self, array: Array) -> None:
        if not array.ndim:
            raise ValueError("it is a single value and has no axis that counts records")
        if array.dtype.hasobject:
            raise ValueError("it holds Python objects; save arrays of numbers or of text")
        self.field = Field(array.dtype, array.shape[1:])
        self._records = len(array)
        self._bytes = array.dtype.itemsize * math.prod(array.shape[1:])
        plain = np.asarray(array)  # a memmap's subclass would cost at every take
        self._array = plain
        self._rows: Array | None = None
        if plain.flags.c_contiguous and plain.size and self._bytes:
            self._rows = plain.reshape(-1).view(np.uint8).reshape(self._records, self._bytes)

    def __len__(self) -> int:
        return self._records

    def take(self, indices: Index) -> Array:
        """Returns the records as one array."""
        if self._rows is None or not len(indices):
            taken: Array = self._array[indices]
            return taken
        rows = self._rows.take(indices, axis=0)
        return rows.reshape(-1).view(self.field.dtype).reshape(len(indices), *self.field.shape)


class Joined:
    """The concatenated records of several arrays, none of which is copied."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.field = parts[0].field

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: Index) -> Array:
        """Returns the records as one array; it loops over the arrays that have records of the batch."""
        homes = np.searchsorted(self._ends, indices, side="right")
        made: Array = np.empty((len(indices), *self.field.shape), self.field.dtype)
        for home in np.unique(homes):
            mine = homes == home
            part = self._parts[home]
            made[mine] = part.take(indices[mine] - (self._ends[home] - len(part)))
        return made


class RaggedRows:
    """Records of unequal lengths: record i is `flat[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, flat: Rows, offsets: Array) -> None:
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
            raise ValueError(f"its offsets are {offsets.dtype} {list(offsets.shape)}, not a list of whole numbers")
        ends = offsets.astype(np.int64)
        if ends[0] != 0 or ends[-1] != len(flat) or (np.diff(ends) < 0).any():
            raise ValueError(
                f"its offsets go from {ends[0]} to {ends[-1]}; they must rise from 0 to {len(flat)}, the elements there are"
            )
        self._flat = flat
        self._begins = ends[:-1]
        self.lengths: Index = np.diff(ends)
        self.field = Field(flat.field.dtype, flat.field.shape, ragged=True)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: Index) -> Ragged:
        """Returns the records, concatenated."""
        lengths = self.lengths[indices]
        before = np.cumsum(lengths) - lengths
        places = np.repeat(self._begins[indices] - before, lengths) + np.arange(lengths.sum())
        return Ragged(self._flat.take(places), lengths)
