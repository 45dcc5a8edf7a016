"""A batch's records as those of its microbatches, and back: what a step takes is cut, what it gives is joined.

Where records are dealt out over ranks, a batch is so many pieces, and each microbatch has a share of every piece: so all ranks have
the same records at the same time, and what they have together lies as the batch does. Of 8 records in 2 pieces, 2 microbatches have

    piece 0    0 1 | 2 3         microbatch 0    0 1 4 5
    piece 1    4 5 | 6 7         microbatch 1    2 3 6 7

so what the microbatches give is joined piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, LocalTensor
from partc.compiler.ir.value_info import Array

NameOf = Callable[[str, str], str]
"""The name of what is made of a value: by the value's name and a word."""


def pieces_of(program: Program, inputs: Iterable[LocalTensor]) -> int:
    """Into how many pieces the batch of a training is dealt out that runs in parts: all inputs of all ranks lie in so many, or in fewer."""
    training, rules = program.training, program.plan.pipeline
    if training is None or training.accumulate == 1:
        return 1
    own = {*training.fixed, *training.totals, *training.scalars}
    shards = (held.version.layout.num_shards(0) for held in inputs if held.version.value.name not in own)
    return math.lcm(training.pieces, rules.pieces if rules is not None else 1, *shards)


class Cutting:
    """Nodes that cut values into microbatches along their records, and join them; `opset`: of the model; `name_of` gives names."""

    def __init__(self, name_of: NameOf, opset: int) -> None:
        self.name_of, self.opset = name_of, opset
        self.nodes: list[ComputeOp] = []
        self.constants: dict[str, Array] = {}

    def cut(self, name: str, made: Sequence[str], dim: int, pieces: int) -> None:
        """The microbatches of a value that has so many pieces along `dim`."""
        if pieces == 1:
            self._split(name, made, dim)
            return
        by = self.name_of(name, "by_piece")
        shares = [self.name_of(one, "by_piece") for one in made]
        self._reshaped(name, by, dim, dim + 1, [pieces, len(made), -1])
        self._split(by, shares, dim + 1)
        for share, one in zip(shares, made, strict=True):
            self._reshaped(share, one, dim, dim + 3, [-1])

    def join(self, parts: Sequence[str], name: str, dim: int, pieces: int) -> None:
        """The value of which `parts` are the microbatches, with so many pieces along `dim`."""
        if pieces == 1:
            self._emit("Concat", parts, [name], axis=dim)
            return
        shares = [self.name_of(one, "of_pieces") for one in parts]
        for one, share in zip(parts, shares, strict=True):
            self._reshaped(one, share, dim, dim + 1, [pieces, -1])
        together = self.name_of(name, "of_pieces")
        self._emit("Concat", shares, [together], axis=dim + 1)
        self._reshaped(together, name, dim, dim + 2, [-1])

    def _reshaped(self, name: str, made: str, begin: int, end: int, between: Sequence[int]) -> None:
        """The dims from `begin` to before `end` replaced by others."""
        middle, shape = (self.name_of(made, word) for word in ("dims", "shape"))
        self.constants[middle] = np.array(between, np.int64)
        head = self.name_of(made, "head")
        tail = self.name_of(made, "tail")
        if begin:
            self._emit("Shape", [name], [head], start=0, end=begin)
        self._emit("Shape", [name], [tail], start=end)
        self._emit("Concat", [*([head] if begin else []), middle, tail], [shape], axis=0)
        self._emit("Reshape", [name, shape], [made])

    def _split(self, name: str, made: Sequence[str], dim: int) -> None:
        if self.opset < 18:
            self._emit("Split", [name], made, axis=dim)
        else:
            self._emit("Split", [name], made, axis=dim, num_outputs=len(made))

    def _emit(self, op_type: str, names: Sequence[str], made: Sequence[str], **attributes: int) -> None:
        inputs, outputs = [ir.Value(name=n) for n in names], [ir.Value(name=n) for n in made]
        node = ir.Node(
            "", op_type, inputs, ir.convenience.convert_attributes(attributes), outputs=outputs, name=made[0]
        )
        self.nodes.append(ComputeOp(node, node))
