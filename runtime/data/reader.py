"""What one rank reads of a batch: the records of its shard of dim 0, transformed, then its shard of the other dims.

A transform of a batch alone sees the records of the rank's shard: it must treat each record by itself. One that takes a generator
gets one drawn from (seed, epoch, batch) and always sees the global batch, of which the shard is taken afterwards: so what it makes
does not depend on how the batch is cut, at the price that every rank transforms all of it. What can differ between data and
model is said before the first batch, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from partc.runtime.artifact.tensors.boxes import divisor, slices

from ..artifact.format import Port
from ..artifact.tensors.dtypes import Array
from ..errors import UsageError
from .code import Batch
from .convert import conversions, described
from .dataset import Dataset
from .fields import Field, Index
from .padding import padded_lengths
from .sampler import Order, Position

T = TypeVar("T")
# sets a batch's generator apart from that of an epoch's permutation, whatever the numbers
_TRANSFORM = 1


class Reader:
    """Reads batches for one rank; UsageError where data, order and inputs do not go together."""

    def __init__(self, data: Dataset, ports: Sequence[Port], rank: int, order: Order) -> None:
        needed = [_records_first(port) for port in ports if port.ranks]
        problems = [*_uneven(needed, order), *_unknown(data, needed)]
        if order.records != data.records:
            problems.insert(0, f"the order is of {order.records} records, the data has {data.records}")
        self._data, self.rank, self._order = data, rank, order
        self._ports = [port for port in needed if rank in port.ranks]
        self._names = (
            list(data.fields) if data.transform else [port.name for port in needed if port.name in data.fields]
        )
        self._widths, long = padded_lengths(data, needed, self._names)
        problems += long
        if not (problems and data.transform):
            fields = self._transformed_fields(order) if data.transform else data.fields
            self._fits, differences = conversions(needed, fields, min(order.batch, order.places))
            problems += differences
        if problems:
            raise UsageError("\n".join(f"{data.spec.where}: {problem}" for problem in problems))

    def read(self, position: Position, indices: Index) -> Batch:
        """By input, what this rank reads of a batch of these records: contiguous and of the input's type."""
        if not self._ports:
            return {}
        size = len(indices)
        spans = {port.name: _rows(port, self.rank, size) for port in self._ports}
        lengths = self._lengths(indices)
        if self._data.transform is None:
            shared: dict[tuple[int, int], list[str]] = {}
            for name, span in spans.items():
                shared.setdefault(span, []).append(name)
            found: Batch = {}
            for (begin, end), names in shared.items():
                found |= self._data.take(indices[begin:end], names, lengths)
            return {name: self._shard(name, found[name]) for name in spans}
        first, last = min(begin for begin, _ in spans.values()), max(end for _, end in spans.values())
        if self._data.transform.random:
            first, last = 0, size
        made = self._transformed(position, indices[first:last], lengths)
        for name in spans:
            if name not in made:
                raise UsageError(f"{self._data.transform.where} returns no '{name}', which it did at first")
        return {
            name: self._shard(name, made[name][begin - first : end - first]) for name, (begin, end) in spans.items()
        }

    def _shard(self, name: str, records: Array) -> Array:
        """This rank's shard of an input, of its records."""
        fits = self._fits[name]
        return np.ascontiguousarray(np.moveaxis(fits.shard(records, self.rank), 0, fits.port.batch_dim))

    def _lengths(self, indices: Index) -> dict[str, int]:
        return {name: width.of(indices) for width in self._widths for name in width.names}

    def _transformed(self, position: Position, indices: Index, lengths: dict[str, int]) -> Batch:
        transform = self._data.transform
        assert transform is not None
        generator = None
        if transform.random:
            entropy = [self._order.seed, position.epoch, position.batch, _TRANSFORM]
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        return transform(self._data.take(indices, self._names, lengths), len(indices), generator)

    def _transformed_fields(self, order: Order) -> dict[str, Field]:
        """The fields that the transform makes, seen on a first batch."""
        indices = np.arange(min(order.batch, self._data.records))
        made = self._transformed(Position(), indices, self._lengths(indices))
        return {name: Field(value.dtype, value.shape[1:]) for name, value in made.items()}


def _records_first(port: Port) -> Port:
    """An input as data has it: with the dim of the records before the others."""

    def turned(dims: Sequence[T]) -> list[T]:
        return [dims[port.batch_dim], *dims[: port.batch_dim], *dims[port.batch_dim + 1 :]]

    if not port.batch_dim or port.shape is None:
        return port
    boxes = None if port.boxes is None else [turned(box) for box in port.boxes]
    return port.model_copy(update={"shape": turned(port.shape), "boxes": boxes})


def _rows(port: Port, rank: int, size: int) -> tuple[int, int]:
    box = port.box(rank)
    if box is None:
        return 0, size
    (rows,) = slices(box[:1], (size,))
    return rows.start, rows.stop


def _uneven(ports: Sequence[Port], order: Order) -> Iterator[str]:
    """Batches, whole or last, that a cut of dim 0 does not divide or that a model of one size does not take."""
    for port in ports:
        parts = divisor(port.boxes or [], 0) if port.shape != [] else 1
        if order.places >= order.batch and order.batch % parts:
            yield (
                f"input '{port.name}' is sharded into {parts} along its batch, and batches have {order.batch} records\n"
                f"  help: take a multiple of {parts}"
            )
        of_one_size = port.shape is not None and port.shape[:1] == [order.batch]
        if order.rest and (order.rest % parts or of_one_size):
            law = (
                f"the model takes {described(port)}"
                if of_one_size
                else f"input '{port.name}' is sharded into {parts} along its batch"
            )
            yield (
                f"{order.places} records in batches of {order.batch} leave {order.rest} for the last batch, and {law}\n"
                f"  help: write drop_last: true, or {'choose a batch size that leaves none' if of_one_size else _evened(order, parts)}"
            )


def _evened(order: Order, parts: int) -> str:
    """What else lets every record be read where ranks cannot share them equally, whatever the size of a batch is."""
    missing = -order.places % parts
    repeated = f"interleave: {parts}, which repeats {missing} of the records"
    return f"{repeated}; exact is to add {missing} to the data whose labels the loss ignores (ignore_index)"


def _unknown(data: Dataset, ports: Sequence[Port]) -> Iterator[str]:
    """Files given to inputs that the model does not have."""
    names = [port.name for port in ports]
    for name in data.spec.files if data.transform is None else ():
        if name not in names:
            yield f"the model has no input '{name}'; its inputs are {', '.join(map(repr, names))}"
