"""A batch's records as those of its microbatches, and back: what a step takes is cut, what it gives is joined.

Where records are dealt out over ranks, a batch is so many pieces, and each microbatch has a share of every piece: so all ranks have
the same records at the same time, and what they have together lies as the batch does. Of 8 records in 2 pieces, 2 microbatches have

    piece 0    0 1 | 2 3         microbatch 0    0 1 4 5
    piece 1    4 5 | 6 7         microbatch 1    2 3 6 7

so what the microbatches give is joined piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from partc.compiler.ir.programs import Compute, Value, added


@dataclass(frozen=True)
class _Dims:
    """A value's sizes as vectors: of the dim that has the records, and of those before and behind it."""

    head: tuple[Value, ...]
    extent: Value
    tail: tuple[Value, ...]

    def around(self, *middle: Value) -> list[Value]:
        """The sizes with others in place of the records' dim."""
        return [*self.head, *middle, *self.tail]


def _number(number: int) -> npt.NDArray[np.int64]:
    return np.array([number], np.int64)


class Cutting:
    """Ops that cut values into microbatches along their records, and join them; `opset`: of the model."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.steps: list[Compute] = []

    def cut(self, value: Value, made: Sequence[Value], dim: int, pieces: int) -> None:
        """The microbatches of a value that has so many pieces along `dim`."""
        if pieces == 1:
            self._split(value, made, dim)
            return
        dims = self._dims(value, dim)
        share, own = value.untyped(".share"), value.untyped(".of_microbatch")
        self._emit("Div", [dims.extent, value.untyped(".shares", _number(pieces * len(made)))], [share])
        self._emit("Mul", [share, value.untyped(".pieces", _number(pieces))], [own])
        by = value.untyped(".by_piece")
        counts = value.untyped(".counts", np.array([pieces, len(made)], np.int64))
        self._reshaped([value], [by], dims.around(counts, share))
        shares = [one.untyped(".by_piece") for one in made]
        self._split(by, shares, dim + 1)
        self._reshaped(shares, made, dims.around(own))

    def join(self, parts: Sequence[Value], value: Value, dim: int, pieces: int) -> None:
        """The value of which `parts` are the microbatches, with so many pieces along `dim`."""
        if pieces == 1:
            self._emit("Concat", parts, [value], axis=dim)
            return
        dims = self._dims(parts[0], dim)
        share, whole = value.untyped(".share"), value.untyped(".extent")
        count = value.untyped(".pieces", _number(pieces))
        self._emit("Div", [dims.extent, count], [share])
        self._emit("Mul", [dims.extent, value.untyped(".microbatches", _number(len(parts)))], [whole])
        shares, together = [one.untyped(".of_pieces") for one in parts], value.untyped(".of_pieces")
        self._reshaped(parts, shares, dims.around(count, share))
        self._emit("Concat", shares, [together], axis=dim + 1)
        self._reshaped([together], [value], dims.around(whole))

    def _dims(self, value: Value, dim: int) -> _Dims:
        """The sizes of a value."""
        head, extent, tail = (value.untyped(hint) for hint in (".head", ".extent", ".tail"))
        if dim:
            self._emit("Shape", [value], [head], start=0, end=dim)
        self._emit("Shape", [value], [extent], start=dim, end=dim + 1)
        self._emit("Shape", [value], [tail], start=dim + 1)
        return _Dims((head,) if dim else (), extent, (tail,))

    def _reshaped(self, values: Sequence[Value], made: Sequence[Value], dims: Sequence[Value]) -> None:
        """Values of one shape in another one: no dim of it is inferred, since the others may have no elements."""
        shape = made[0].untyped(".shape")
        self._emit("Concat", dims, [shape], axis=0)
        for value, one in zip(values, made, strict=True):
            self._emit("Reshape", [value, shape], [one], allowzero=1)

    def _split(self, value: Value, made: Sequence[Value], dim: int) -> None:
        if self.opset < 18:
            self._emit("Split", [value], made, axis=dim)
        else:
            self._emit("Split", [value], made, axis=dim, num_outputs=len(made))

    def _emit(self, op_type: str, inputs: Sequence[Value], made: Sequence[Value], **attributes: int) -> None:
        self.steps.append(added(op_type, inputs, made, attributes))
