"""Batches of a training whose programs run on a part of a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from ..artifact.boxes import divisor
from ..artifact.format import Manifest, Port, TrainingRecord
from ..errors import InputError
from ..execution.symbol_bindings import smallest

Item = TypeVar("Item")


def of_batch(manifest: Manifest) -> Manifest:
    """The manifest with the inputs and the symbols of a whole batch, without what a step is given beside it.

    The smallest size of a symbol is one that can be cut into parts.
    """
    record = manifest.training
    if record is None:
        return manifest
    own = {*record.scalars, *record.totals}
    inputs = [_of_batch(port, record) for port in manifest.inputs if port.name not in own]
    symbols = {
        name: law.model_copy(update={"min": smallest(manifest.symbols[name]) * record.accumulate})
        for name, law in record.symbols.items()
    }
    return manifest.model_copy(update={"inputs": inputs, "symbols": {**manifest.symbols, **symbols}})


def _of_batch(port: Port, record: TrainingRecord) -> Port:
    """An input as it is given for a whole batch, where the program has the size of a part."""
    if record.accumulate == 1 or port.name in record.fixed or not port.shape or not isinstance(port.shape[0], int):
        return port
    return port.model_copy(update={"shape": [port.shape[0] * record.accumulate, *port.shape[1:]]})


def with_next(batches: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Each batch with the one that follows it, which is read before the first is handled."""
    source = iter(batches)
    batch = next(source, None)
    while batch is not None:
        following = next(source, None)
        yield batch, following
        batch = following


def shards_of_batch(manifest: Manifest) -> int:
    """The number of equal shards of a batch's records, such that every rank has whole shards, and the same ones of every input."""
    record = manifest.training
    assert record is not None
    own = {*record.scalars, *record.totals, *record.fixed}
    ports = [port for port in manifest.inputs if port.ranks and port.shape and port.name not in own]
    return math.lcm(record.pieces, *(divisor(port.boxes or [], 0) for port in ports))


def parts(
    batch: Mapping[str, object], ports: Mapping[str, Port], rank: int, count: int, pieces: int
) -> list[dict[str, Any]]:
    """The `count` equal parts of what a rank has of a batch.

    A part has its share of every piece, so that it has the same records on all ranks, also where one has a single piece and another
    all of them. InputError for a number of records that has no such parts, and for what is no array.
    """
    arrays: dict[str, tuple[np.ndarray[Any, Any], int]] = {}
    for name, value in batch.items():
        try:
            array = np.asarray(value)
        except Exception as error:
            raise InputError(f"input '{name}': a {type(value).__name__} is not an array: {error}") from None
        box = ports[name].box(rank)
        mine = pieces if box is None else pieces * (box[0][1] - box[0][0]) // box[0][2]
        if not array.ndim or len(array) % (count * mine):
            records = f"{len(array)} records" if array.ndim else "a number"
            raise InputError(
                f"input '{name}': {records} cannot be split into {count} parts, as `accumulate` of the plan says\n"
                f"  help: give every rank a multiple of {count * mine}"
            )
        arrays[name] = array.reshape(mine, count, len(array) // (count * mine), *array.shape[1:]), mine
    return [
        {
            name: one[0, part] if mine == 1 else one[:, part].reshape(mine * one.shape[2], *one.shape[3:])
            for name, (one, mine) in arrays.items()
        }
        for part in range(count)
    ]
