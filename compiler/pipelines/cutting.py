"""A batch's records as those of its microbatches, and back: what a step takes is cut, what it gives is joined.

Where records are dealt out over ranks, a batch is so many pieces, and each microbatch has a share of every piece: so all ranks have
the same records at the same time, and what they have together lies as the batch does. Of 8 records in 2 pieces, 2 microbatches have

    piece 0    0 1 | 2 3         microbatch 0    0 1 4 5
    piece 1    4 5 | 6 7         microbatch 1    2 3 6 7

so what the microbatches give is joined piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from partc.compiler.ir.programs import Compute, Value, added


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
        by = value.untyped(".by_piece")
        shares = [one.untyped(".by_piece") for one in made]
        self._reshaped(value, by, dim, dim + 1, [pieces, len(made), -1])
        self._split(by, shares, dim + 1)
        for share, one in zip(shares, made, strict=True):
            self._reshaped(share, one, dim, dim + 3, [-1])

    def join(self, parts: Sequence[Value], value: Value, dim: int, pieces: int) -> None:
        """The value of which `parts` are the microbatches, with so many pieces along `dim`."""
        if pieces == 1:
            self._emit("Concat", parts, [value], axis=dim)
            return
        shares = [one.untyped(".of_pieces") for one in parts]
        for one, share in zip(parts, shares, strict=True):
            self._reshaped(one, share, dim, dim + 1, [pieces, -1])
        together = value.untyped(".of_pieces")
        self._emit("Concat", shares, [together], axis=dim + 1)
        self._reshaped(together, value, dim, dim + 2, [-1])

    def _reshaped(self, value: Value, made: Value, begin: int, end: int, between: Sequence[int]) -> None:
        """The dims from `begin` to before `end` replaced by others."""
        middle, shape = made.untyped(".dims", np.array(between, np.int64)), made.untyped(".shape")
        head, tail = made.untyped(".head"), made.untyped(".tail")
        if begin:
            self._emit("Shape", [value], [head], start=0, end=begin)
        self._emit("Shape", [value], [tail], start=end)
        self._emit("Concat", [*([head] if begin else []), middle, tail], [shape], axis=0)
        self._emit("Reshape", [value, shape], [made])

    def _split(self, value: Value, made: Sequence[Value], dim: int) -> None:
        if self.opset < 18:
            self._emit("Split", [value], made, axis=dim)
        else:
            self._emit("Split", [value], made, axis=dim, num_outputs=len(made))

    def _emit(self, op_type: str, inputs: Sequence[Value], made: Sequence[Value], **attributes: int) -> None:
        self.steps.append(added(op_type, inputs, made, attributes))
