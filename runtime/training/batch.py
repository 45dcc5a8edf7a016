"""What a training is given in a step, a whole batch, where its programs run a part at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..artifact.boxes import divisor
from ..artifact.format import Manifest, Port, TrainingRecord
from ..errors import InputError
from ..execution.symbol_bindings import smallest


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


def pieces_of(manifest: Manifest) -> int:
    """Into how many pieces the records of a batch are dealt out: every rank has some of them whole, of every input the same ones."""
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
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in batch.items():
        try:
            array = np.asarray(value)
        except Exception as error:
            raise InputError(f"input '{name}': a {type(value).__name__} is no array: {error}") from None
        box = ports[name].box(rank)
        mine = pieces if box is None else pieces * (box[0][1] - box[0][0]) // box[0][2]
        if not array.ndim or len(array) % (count * mine):
            records = f"{len(array)} records" if array.ndim else "a number"
            raise InputError(
                f"input '{name}': {records} cannot be cut into {count} parts, as `accumulate` of the plan says\n"
                f"  help: give every rank a multiple of {count * mine}"
            )
        size = len(array) // (count * mine)
        shares = array.reshape(mine, count, size, *array.shape[1:])
        for part, one in enumerate(found):
            one[name] = shares[0, part] if mine == 1 else shares[:, part].reshape(mine * size, *array.shape[1:])
    return found
