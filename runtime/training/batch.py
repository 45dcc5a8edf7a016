"""What a training is given in a step, a whole batch, where its programs run a part at a time."""

from __future__ import annotations

from ..bindings import smallest
from ..format import Manifest, Port, TrainingRecord


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
