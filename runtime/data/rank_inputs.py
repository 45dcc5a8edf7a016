"""Computes the part of a batch that one rank reads, from the shards of its inputs: a range of the records, and its shard of the other dims.

The source of the batch does not matter. Batch sizes that ranks cannot share are found on every rank in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from partc.runtime.artifact.tensors.boxes import divisor, slices

from ..artifact.format import Port
from ..artifact.tensors.dtypes import Array
from .convert import Conversion, described

T = TypeVar("T")


class RankInputs:
    """The inputs of a model that any rank reads, and in `ports` those of which this rank reads a shard."""

    def __init__(self, ports: Sequence[Port], rank: int) -> None:
        self.rank = rank
        self.needed = [_records_first(port) for port in ports if port.ranks]
        """The inputs that any rank reads, with the dim of the records moved to the front."""
        self.ports = [port for port in self.needed if rank in port.ranks]

    def spans(self, size: int) -> dict[str, tuple[int, int]]:
        """Maps each input to the range of a batch's records that this rank reads."""
        return {port.name: _span(port, self.rank, size) for port in self.ports}

    def shard(self, conversion: Conversion, records: Array) -> Array:
        """Returns this rank's shard of an input, from the records that the rank reads: contiguous and of the input's type."""
        found = conversion.shard(records, self.rank)
        if not conversion.port.batch_dim:
            return found
        return np.ascontiguousarray(np.moveaxis(found, 0, conversion.port.batch_dim))

    def indivisible(self, size: int) -> Iterator[tuple[Port, int]]:
        """Yields each input whose number of shards along the batch does not divide `size`, with that number."""
        for port in self.needed:
            parts = divisor(port.boxes or [], 0) if port.shape != [] else 1
            if size % parts:
                yield port, parts

    def of_one_size(self, size: int) -> Iterator[Port]:
        """Returns the inputs that were compiled for exactly this batch size."""
        return (port for port in self.needed if port.shape is not None and port.shape[:1] == [size])


def uneven_batch(inputs: RankInputs, batch: int) -> Iterator[str]:
    """Yields a problem for each input whose number of shards along the batch does not divide the batch size."""
    for port, parts in inputs.indivisible(batch):
        yield (
            f"input '{port.name}' is sharded into {parts} along its batch, and batches have {batch} records\n"
            f"  help: take a multiple of {parts}"
        )


def uneven_rest(inputs: RankInputs, batch: int, rest: int) -> Iterator[tuple[str, int]]:
    """Yields each reason why a smaller last batch cannot be read, with the number of shards that does not divide it.

    That number is 0 where the model takes batches of one size only.
    """
    single = {port.name for port in inputs.of_one_size(batch)}
    parts = {port.name: number for port, number in inputs.indivisible(rest)}
    for port in inputs.needed:
        if port.name in single:
            yield f"the model takes {described(port)}", 0
        elif port.name in parts:
            yield f"input '{port.name}' is sharded into {parts[port.name]} along its batch", parts[port.name]


def _records_first(port: Port) -> Port:
    """Returns an input as data has it: with the dim of the records moved to the front."""

    def turned(dims: Sequence[T]) -> list[T]:
        return [dims[port.batch_dim], *dims[: port.batch_dim], *dims[port.batch_dim + 1 :]]

    if not port.batch_dim or port.shape is None:
        return port
    boxes = None if port.boxes is None else [turned(box) for box in port.boxes]
    return port.model_copy(update={"shape": turned(port.shape), "boxes": boxes})


def _span(port: Port, rank: int, size: int) -> tuple[int, int]:
    box = port.box(rank)
    if box is None:
        return 0, size
    (rows,) = slices(box[:1], (size,))
    return rows.start, rows.stop
