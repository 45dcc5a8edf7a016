"""Reads a batch for one rank: the records of its shard of dim 0, transformed, then its shard of the other dims.

A transform that takes only a batch gets the records of the rank's shard: it must treat each record independently. One that takes a
generator gets one seeded by (seed, epoch, batch) and always the global batch, of which the shard is taken afterwards. So its result does
not depend on how the batch is sharded, at the price that every rank transforms all of it. All possible differences between data and model
are reported before the first batch, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..artifact.format import Port
from ..artifact.tensors.dtypes import Array
from ..errors import UsageError
from .code import Batch
from .convert import conversions
from .dataset import Dataset
from .fields import Field, Index
from .padding import padded_lengths
from .rank_inputs import RankInputs, uneven_batch, uneven_rest
from .sampler import Order, Position

# makes the seed of a batch's generator differ from that of an epoch's permutation, for all numbers
_TRANSFORM = 1


class Reader:
    """Reads batches for one rank; UsageError where data, order and inputs do not fit together."""

    def __init__(self, data: Dataset, ports: Sequence[Port], rank: int, order: Order) -> None:
        self._inputs = RankInputs(ports, rank)
        needed = self._inputs.needed
        known = [port.name for port in needed]
        unknown = [name for name in (data.spec.files if data.transform is None else ()) if name not in known]
        inputs = ", ".join(map(repr, known))
        problems = [*_uneven(self._inputs, order)]
        problems += [f"the model has no input '{name}'; its inputs are {inputs}" for name in unknown]
        if order.records != data.records:
            problems.insert(0, f"the order is of {order.records} records, the data has {data.records}")
        self._data, self.rank, self._order = data, rank, order
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
        """Returns this rank's shard of each input for a batch of these records: contiguous and of the input's type."""
        if not self._inputs.ports:
            return {}
        size = len(indices)
        spans = self._inputs.spans(size)
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
        """Returns this rank's shard of an input, from the records that the rank reads."""
        return self._inputs.shard(self._fits[name], records)

    def _lengths(self, indices: Index) -> dict[str, int]:
        return {name: width.of(indices) for width in self._widths for name in width.names}

    def _transformed(self, position: Position, indices: Index, lengths: dict[str, int]) -> Batch:
        transform = self._data.transform
        assert transform is not None
        generator = None
        if transform.random:
            generator = batch_generator(self._order.seed, position)
        return transform(self._data.take(indices, self._names, lengths), len(indices), generator)

    def _transformed_fields(self, order: Order) -> dict[str, Field]:
        """Returns the fields that the transform returns, as found by transforming a first batch."""
        indices = np.arange(min(order.batch, self._data.records))
        made = self._transformed(Position(), indices, self._lengths(indices))
        return {name: Field(value.dtype, value.shape[1:]) for name, value in made.items()}


def batch_generator(seed: int, position: Position) -> np.random.Generator:
    """Returns the generator that a transform gets for a batch."""
    entropy = [seed, position.epoch, position.batch, _TRANSFORM]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def _uneven(inputs: RankInputs, order: Order) -> Iterator[str]:
    """Yields a problem for each input whose shards do not divide a full or the last batch, or that takes only another batch size."""
    if order.places >= order.batch:
        yield from uneven_batch(inputs, order.batch)
    for law, parts in uneven_rest(inputs, order.batch, order.rest) if order.rest else ():
        yield (
            f"{order.places} records in batches of {order.batch} leave {order.rest} for the last batch, and {law}\n"
            f"  help: write drop_last: true, or {_evened(order, parts) if parts else 'choose a batch size that leaves none'}"
        )


def _evened(order: Order, parts: int) -> str:
    """Returns the other ways, for a help text, to read every record where ranks cannot share the last batch equally."""
    missing = -order.places % parts
    repeated = f"interleave: {parts}, which repeats {missing} of the records"
    return f"{repeated}; exact is to add {missing} to the data whose labels the loss ignores (ignore_index)"
