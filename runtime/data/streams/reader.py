"""Reads one rank's part of a stream's batch: its records, transformed, in the types and the shards of the model's inputs.

A batch is checked against the model if its types or shapes differ from those of the batch before. A type must not change; a shape may
change if the model has a symbol for it. A transform gets the same arguments as for records in files (`data/reader.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.artifact.training.data_spec import Spec

from ...errors import UsageError
from ...user_code import user_code
from ..code import Batch, Transform
from ..convert import Conversion, conversions
from ..dataset import LENGTH
from ..fields import Field, Index, Ragged
from ..padding import padded_lengths
from ..rank_inputs import RankInputs
from ..reader import batch_generator
from ..sampler import Position
from ..sources.naming import Naming, Unfit, quoted
from ..sources.values import as_array, field_values, stacked
from .stream import StreamBatch


class StreamReader:
    """Converts batches to a rank's inputs; UsageError, with the location, where they do not fit the model or the batches before."""

    def __init__(
        self, spec: Spec, where: str, inputs: RankInputs, naming: Naming, transform: Transform | None, seed: int
    ) -> None:
        self.inputs, self.where = inputs, where
        self._spec, self._naming, self._transform, self._seed = spec, naming, transform, seed
        self._dtypes: dict[str, np.dtype[np.generic]] = {}
        self._signature: dict[str, Field] = {}
        self._conversions: dict[str, Conversion] = {}

    def span(self, size: int) -> tuple[int, int]:
        """Returns the range of records that this rank needs from a batch of this size."""
        if self._transform is not None and self._transform.random:
            return 0, size
        spans = self.inputs.spans(size).values()
        return min(begin for begin, _ in spans), max(end for _, end in spans)

    def read(self, batch: StreamBatch, position: Position) -> Batch:
        """Returns this rank's shard of each input for a batch."""
        place = f"{self.where}: batch {position.batch} of epoch {position.epoch}"
        first, last = self.span(batch.size)
        try:
            with user_code(self.where, f"taking batch {position.batch} of epoch {position.epoch}"):
                fields = self._of_records(batch, first, last) if batch.records else self._of_batch(batch, first, last)
        except Unfit as error:
            raise UsageError(f"{place}: {error}") from None
        if self._transform is not None:
            generator = batch_generator(self._seed, position) if self._transform.random else None
            fields = self._transform(fields, last - first, generator)
        self._check(fields, batch.size, place)
        found = {}
        for name, (begin, end) in self.inputs.spans(batch.size).items():
            found[name] = self.inputs.shard(self._conversions[name], fields[name][begin - first : end - first])
        return found

    def _of_batch(self, batch: StreamBatch, first: int, last: int) -> Batch:
        """Returns the fields of a batch with only the records that this rank needs."""
        wanted = self._wanted()
        fields: Batch = {}
        for name, value in self._naming.of(batch.value, "a batch").items():
            if wanted is not None and name not in wanted:
                continue
            array = field_values(value)
            if isinstance(array, Ragged):
                raise Unfit(f"'{name}' is a list of arrays of unequal lengths\n  help: fill them up in `collate_fn`")
            if not array.ndim or len(array) != batch.rows:
                shape = list(array.shape)
                raise Unfit(
                    f"'{name}' is {shape} in a batch of {batch.rows} records\n  help: its first dim counts records"
                )
            fields[name] = array[first - batch.first : last - batch.first]
        return fields

    def _of_records(self, given: StreamBatch, first: int, last: int) -> Batch:
        """Returns the fields of the records that this rank needs, stacked."""
        assert isinstance(given.value, list)
        pads = self._spec.pad
        records = [self._naming.of(one) for one in (given.value if pads else given.value[first:last])]
        begin = 0 if pads else first
        wanted = self._wanted()
        names = [name for name in records[0] if wanted is None or name in wanted or name in pads]
        for number, record in enumerate(records):
            if missing := [name for name in names if name not in record]:
                raise Unfit(f"record {begin + number} of it has no '{missing[0]}'; it has {quoted(record)}")
        fields: Batch = {}
        ragged: dict[str, Ragged] = {}
        for name in names:
            values = [record[name] for record in records]
            if name in pads:
                ragged[name] = _ragged(values, name)
                continue
            array = stacked(values[first - begin : last - begin])
            if isinstance(array, Ragged):
                raise Unfit(
                    f"records of '{name}' have unequal lengths, {array.lengths.min()} to {array.lengths.max()}\n"
                    f"  help: say what fills them up: pad: {{{name}: 0}}"
                )
            fields[name] = array
        return fields | self._padded(ragged, first, last)

    def _padded(self, ragged: Mapping[str, Ragged], first: int, last: int) -> Batch:
        """Returns ragged fields, padded to the length that the global batch needs, and their true lengths."""
        view = _RaggedBatch(self._spec, self._transform, ragged)
        lengths, problems = padded_lengths(view, self.inputs.needed, [*ragged])
        if problems:
            raise Unfit("\n".join(problems))
        fields: Batch = {}
        for one in lengths:
            for name in one.names:
                value = ragged[name]
                width = one.of(np.arange(len(value.lengths)))
                fields[name] = value.padded(width, self._spec.pad[name])[first:last]
                fields[name + LENGTH] = value.lengths[first:last]
        return fields

    def _wanted(self) -> Collection[str] | None:
        """Returns the fields that the model reads; None if there is a transform, which may read any field."""
        return None if self._transform is not None else {port.name for port in self.inputs.needed}

    def _check(self, fields: Batch, size: int, place: str) -> None:
        """Raises UsageError where the fields do not fit the model, or have other types than in the batches before."""
        signature = {name: Field(one.dtype, one.shape[1:]) for name, one in fields.items()}
        if signature == self._signature:
            return
        problems = [
            f"'{name}' is {one.dtype}, and was {self._dtypes[name]} before\n  help: give every batch the same types"
            for name, one in signature.items()
            if one.dtype != self._dtypes.get(name, one.dtype)
        ]
        by_input, differences = conversions(self.inputs.needed, signature, size)
        if gone := [name for name in self._dtypes if name not in signature]:
            problems += [f"it has no {quoted(gone)}, which batches had before; it has {quoted(signature)}"]
        elif self._signature:
            before = ", ".join(f"'{name}' {one}" for name, one in self._signature.items())
            problems += [f"{one}\n  batches before had {before}" for one in differences]
        else:
            problems += differences
        if problems:
            raise UsageError("\n".join(f"{place}: {problem}" for problem in problems))
        self._signature, self._conversions = signature, by_input
        self._dtypes = {name: one.dtype for name, one in signature.items()}


@dataclass(frozen=True)
class _RaggedBatch:
    """The ragged fields of one batch, in the form that `padded_lengths` takes."""

    spec: Spec
    transform: Transform | None
    fields: Mapping[str, Ragged]

    def ragged(self, names: Collection[str]) -> list[str]:
        return [name for name in names if name in self.fields]

    def lengths(self, name: str) -> Index:
        return self.fields[name].lengths


def _ragged(values: Sequence[object], name: str) -> Ragged:
    arrays: list[Array] = [as_array(value) for value in values]
    if any(not array.ndim for array in arrays):
        raise Unfit(f"records of '{name}' are single values and have no length")
    return Ragged.of(arrays)
