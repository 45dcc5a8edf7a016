"""Deals the records of a batch to its microbatches, and joins the microbatches' outputs.

If records are dealt out over ranks, a batch consists of pieces, and each microbatch has a share of every piece: so all ranks have the same
records at the same time, and the values of a microbatch are sharded as those of the batch. Of 8 records in 2 pieces, 2 microbatches have

    piece 0    0 1 | 2 3         microbatch 0    0 1 4 5
    piece 1    4 5 | 6 7         microbatch 1    2 3 6 7

so the microbatches' outputs are joined piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Comm, Compute, RankTensor, Value, added
from partc.compiler.pipelines.phases import UPDATE, Label, Unit
from partc.compiler.pipelines.row import Clones, Row
from partc.compiler.tasks.localize import pieces_of
from partc.compiler.training.microbatch_model import PART


@dataclass(frozen=True)
class _Dims:
    """A value's sizes as vectors: of the dim that has the records, and of the dims before and after it."""

    head: tuple[Value, ...]
    extent: Value
    tail: tuple[Value, ...]

    def around(self, *middle: Value) -> list[Value]:
        """Returns the sizes with `middle` in place of the records' dim."""
        return [*self.head, *middle, *self.tail]


def _number(number: int) -> npt.NDArray[np.int64]:
    return np.array([number], np.int64)


class Cutting:
    """Writes ops that cut values into microbatches along their records, and join them; `opset`: that of the model."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.steps: list[Compute] = []

    def cut(self, value: Value, microbatch_values: Sequence[Value], dim: int, pieces: int) -> None:
        """Cuts a value that has `pieces` pieces along `dim` into its microbatches `microbatch_values`."""
        if pieces == 1:
            self._split(value, microbatch_values, dim)
            return
        dims = self._dims(value, dim)
        share, own = value.derived_untyped(".share"), value.derived_untyped(".of_microbatch")
        self._emit(
            "Div", [dims.extent, value.derived_untyped(".shares", _number(pieces * len(microbatch_values)))], [share]
        )
        self._emit("Mul", [share, value.derived_untyped(".pieces", _number(pieces))], [own])
        by = value.derived_untyped(".by_piece")
        counts = value.derived_untyped(".counts", np.array([pieces, len(microbatch_values)], np.int64))
        self._reshaped([value], [by], dims.around(counts, share))
        shares = [one.derived_untyped(".by_piece") for one in microbatch_values]
        self._split(by, shares, dim + 1)
        self._reshaped(shares, microbatch_values, dims.around(own))

    def join(self, parts: Sequence[Value], value: Value, dim: int, pieces: int) -> None:
        """Joins the microbatches `parts` to a value that has `pieces` pieces along `dim`."""
        if pieces == 1:
            self._emit("Concat", parts, [value], axis=dim)
            return
        dims = self._dims(parts[0], dim)
        share, whole = value.derived_untyped(".share"), value.derived_untyped(".extent")
        count = value.derived_untyped(".pieces", _number(pieces))
        self._emit("Div", [dims.extent, count], [share])
        self._emit("Mul", [dims.extent, value.derived_untyped(".microbatches", _number(len(parts)))], [whole])
        shares, together = [one.derived_untyped(".of_pieces") for one in parts], value.derived_untyped(".of_pieces")
        self._reshaped(parts, shares, dims.around(count, share))
        self._emit("Concat", shares, [together], axis=dim + 1)
        self._reshaped([together], [value], dims.around(whole))

    def _dims(self, value: Value, dim: int) -> _Dims:
        """Writes the sizes of a value."""
        head, extent, tail = (value.derived_untyped(hint) for hint in (".head", ".extent", ".tail"))
        if dim:
            self._emit("Shape", [value], [head], start=0, end=dim)
        self._emit("Shape", [value], [extent], start=dim, end=dim + 1)
        self._emit("Shape", [value], [tail], start=dim + 1)
        return _Dims((head,) if dim else (), extent, (tail,))

    def _reshaped(self, values: Sequence[Value], made: Sequence[Value], dims: Sequence[Value]) -> None:
        """Reshapes values of one shape to another; no dim is inferred, since a value may have no elements."""
        shape = made[0].derived_untyped(".shape")
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


class Records:
    """The inputs and outputs of a program's units that have records of the batch; each microbatch has a share of each of `pieces`."""

    def __init__(self, program: Lowered, units: Sequence[Unit], clones: Clones) -> None:
        self.training, self.along, self.clones = program.training, program.batch_dims, clones
        self.opset = program.model.opset_imports.get("", 18)
        self.pieces = math.lcm(
            pieces_of(program, (held.version for unit in units for held in self.inputs(unit))),
            *(self.shards(held) for unit in units for held in (*self.inputs(unit), *self.outputs(unit))),
        )
        self._whole: dict[Value, Value] = {}

    def inputs(self, unit: Unit) -> list[RankTensor]:
        """Returns the inputs that have records of the batch."""
        return [held for held in unit.program.inputs if held.value in unit.batch and held.version.value.name != PART]

    def outputs(self, unit: Unit) -> list[RankTensor]:
        """Returns the outputs that have records of the batch, in a program that does not train."""
        own = {held.value for held in unit.program.inputs}
        return [held for held in unit.program.outputs if held.version.value in self.along and held.value not in own]

    def of_step(self, held: RankTensor) -> Value:
        """Returns the step's input or output for that of a microbatch."""
        return self.whole(held) if held.version.value in self.along else self.clones.of_batch(held.value)

    def whole(self, port: RankTensor) -> Value:
        """Returns the input or output with the records of all microbatches for that of one."""
        if port.value not in self._whole:
            shape = self.clones.dims.shape(port.value.shape, self.along[port.version.value])
            self._whole[port.value] = replace(port.value, shape=shape)
        return self._whole[port.value]

    def shards(self, held: RankTensor) -> int:
        """Returns the number of shards of the records of an input or output."""
        return held.version.layout.num_shards(self.along[held.version.value])

    def deal(self, row: Row) -> None:
        """Gives each microbatch its records: a share of every piece of the batch, so that all ranks have the same ones."""
        number = next((one.value for one in row.unit.program.inputs if one.version.value.name == PART), None)
        if number is not None:
            for k, values in enumerate(row.micro):
                values[number] = number.derived_untyped(f".{k}", np.array(k, np.int64))
        cutting = Cutting(self.opset)
        for held in self.inputs(row.unit):
            made = [self.clones.in_microbatch(held.value, k) for k in range(self.clones.count)]
            for values, one in zip(row.micro, made, strict=True):
                values[held.value] = one
            cutting.cut(self.whole(held), made, self.along[held.version.value], self.pieces // self.shards(held))
        row.steps += cutting.steps

    def _join_records(self, row: Row) -> None:
        """Writes the outputs of a step that does not train: outputs with records are joined, others are the same in all microbatches."""
        cutting, known = Cutting(self.opset), {held.value for held in self.outputs(row.unit)}
        for held in row.unit.program.outputs:
            parts = [values[held.value] for values in row.micro if held.value in values]
            if held.value in known:
                cutting.join(parts, self.whole(held), self.along[held.version.value], self.pieces // self.shards(held))
            elif parts and held.version.value not in self.along:
                row.emit("Identity", parts[:1], [self.of_step(held)])
        row.steps += cutting.steps

    def join(self, row: Row, labels: Sequence[Label]) -> None:
        """Writes the outputs of the step, and the new statistics, from those of the microbatches."""
        if self.training is None:
            self._join_records(row)
            return
        like = row.unit.program
        wanted = {held.value: held.version.value.name in self.training.records.summed for held in like.outputs}
        for one in like.state:
            if one.kind == "statistics" and one.next is not None:
                wanted[one.next] = one.next.of is not None and one.next.of.name in self.training.records.summed
        for step, label in zip(like.steps, labels, strict=True):
            for value in step.reads if label == UPDATE and not row.unit.appends(step) else ():
                of = step.value if isinstance(step, Comm) else value.of
                if value not in row.sums:
                    wanted.setdefault(value, of is not None and of.name in self.training.records.summed)
        for value, summed in wanted.items():
            parts = [values[value] for values in row.micro if value in values]
            if len(parts) < self.clones.count or value.of is None:
                continue
            if value.of.dtype is not None and not value.of.dtype.is_floating_point():
                row.emit("Identity", parts[:1], [self.clones.of_batch(value)])  # a counter of steps
            elif row.tree_sums is not None and summed:
                for k, part in enumerate(parts):
                    row.tree_sums.add(value, self.clones.of_batch(value), k, part)
            else:
                row.put_together(parts, self.clones.of_batch(value), summed)
            for values in row.micro:
                del values[value]
