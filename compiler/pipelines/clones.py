"""The copy of a value of one microbatch's program in the program of a step: one object on all ranks, since both ends of a message refer to
it.
"""

from __future__ import annotations

from dataclasses import replace

from partc.compiler.analysis.part_symbols import BatchDims
from partc.compiler.ir.programs import Value


class Clones:
    """Values of a step made of those of one microbatch's program, in the dims of the whole batch."""

    def __init__(self, dims: BatchDims) -> None:
        self.dims, self.count = dims, dims.count
        self._of_batch: dict[Value, Value] = {}
        self._micro: dict[tuple[Value, int], Value] = {}

    def of_batch(self, value: Value) -> Value:
        """The value where no microbatch has one of its own, and in bodies."""
        clone = self._of_batch.get(value)
        if clone is None:
            shape = self.dims.shape(value.shape)
            if value.constant is not None:  # its items are its type
                clone = Value(value.hint, value.base, constant=value.constant)
            else:
                clone = value if shape == value.shape else replace(value, shape=shape)
            self._of_batch[value] = clone
        return clone

    def in_microbatch(self, value: Value, k: int) -> Value:
        """The value of a microbatch: `h.3`."""
        found = self._micro.get((value, k))
        if found is None:
            found = self._micro[value, k] = self.of_batch(value).derived(f".{k}")
        return found
