"""Computes the exponential moving average e of each trained parameter p: e' = e + (1 - decay) (p - e) after each step.

An average is a tensor of the state, `fc1.weight.ema`: under any plan a rank has the same shard of it as of the parameter. Elements are
averaged independently, so this is the shard of the unsharded model's average. It begins as the parameter's first value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..artifact.format import StateRecord
from ..checkpoint.index import EMA
from ..execution.state import State

_AT_ONCE = 1 << 16
"""Elements that are averaged at a time, so that temporary arrays stay in the cache."""


class Averages:
    """The averages of a rank's parameters.

    `kept`: the state records of the whole job, whose trained parameters have averages; `records` are the records of these averages.
    """

    def __init__(self, state: State, kept: list[StateRecord], decay: float) -> None:
        trained = {one.tensor for one in kept if one.kind == "parameter" and one.next}
        self.decay = decay
        self.records = [_record(one) for one in kept if one.kind == "parameter" and one.tensor in trained]
        self._names = trained
        self._parameters = replace(
            state, records=[one for one in state.records if one.kind == "parameter" and one.tensor in trained]
        )
        self._averages: list[Array] = []
        self.begin()

    def begin(self) -> None:
        """Sets the averages to the current parameters."""
        self._averages = [np.array(array) for _, array in self._parameters.arrays()]

    def arrays(self) -> list[tuple[StateRecord, Array]]:
        """Returns the averages of this rank with their records, as checkpoints store them."""
        records = [_record(one) for one in self._parameters.records]
        return list(zip(records, self._averages, strict=True))

    def update(self) -> None:
        """Updates the averages with the parameters after a step."""
        share = 1 - self.decay
        for average, (_, array) in zip(self._averages, self._parameters.arrays(), strict=True):
            into, new = average.reshape(-1), array.reshape(-1)
            for at in range(0, into.size, _AT_ONCE):
                there = into[at : at + _AT_ONCE]
                off = np.subtract(new[at : at + _AT_ONCE], there)
                np.multiply(off, share, out=off, casting="unsafe")
                np.add(there, off, out=there)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the averages are in the place of the parameters."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        held = {one.value: array for one, array in zip(self._parameters.records, self._averages, strict=True)}

        def exchange(record: StateRecord, array: Array) -> None:
            there = array.copy()
            array[...] = held[record.value]
            held[record.value][...] = there

        self._parameters.fill(exchange, self._names)


def _record(parameter: StateRecord) -> StateRecord:
    """Returns the record of a parameter's average."""
    names = {"value": f"{parameter.value}.{EMA}", "tensor": f"{parameter.tensor}.{EMA}", "parameter": parameter.tensor}
    return parameter.model_copy(update={**names, "kind": EMA, "next": ""})
