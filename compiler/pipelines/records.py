"""What of a program has the records of the batch: inputs are dealt out to the microbatches, and what these give is joined."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import CommOp, LocalTensor, read_names
from partc.compiler.ir.value_info import Shape
from partc.compiler.lower.cutting import Cutting, pieces_of
from partc.compiler.pipelines.batch_dims import BatchDims
from partc.compiler.pipelines.phases import UPDATE, Label, Unit
from partc.compiler.pipelines.row import Names, Row
from partc.compiler.training.in_parts import PART


class Records:
    """Inputs and outputs of the units of a program with records of the batch; `pieces`: of each a microbatch has its share."""

    def __init__(self, program: Program, units: Sequence[Unit], dims: BatchDims, names: Names) -> None:
        self.training, self.given, self.dims, self.names = program.training, program.microbatched, dims, names
        self.opset = program.model.opset_imports.get("", 18)
        self.values = {held.version.value for unit in units for held in self.inputs(unit)}
        self.pieces = math.lcm(
            pieces_of(program, (held for unit in units for held in self.inputs(unit))),
            *(self._shards(held) for unit in units for held in (*self.inputs(unit), *self.outputs(unit))),
        )

    def inputs(self, unit: Unit) -> list[LocalTensor]:
        """The inputs that have records of the batch."""
        return [held for held in unit.program.inputs if held.name in unit.batch and held.name != PART]

    def outputs(self, unit: Unit) -> list[LocalTensor]:
        """The outputs that have records of the batch, where nothing is trained."""
        known = self.given.records if self.given else {}
        own = {held.name for held in unit.program.inputs}
        return [held for held in unit.program.outputs if held.version.value in known and held.name not in own]

    def shape(self, held: LocalTensor, shape: Shape | None) -> Shape | None:
        """The shape of an input or output of the batch, of which that of a microbatch is known."""
        return self._whole(shape, self._along(held))

    def global_shape(self, value: ir.Value, shape: Shape | None) -> Shape | None:
        """The global shape of a value; of an input or output it is that of the batch."""
        if self.given and value in self.given.records:
            return self._whole(shape, self.given.records[value])
        return self._whole(shape, 0) if value in self.values else self.dims.shape(shape)

    def _whole(self, shape: Shape | None, along: int) -> Shape | None:
        """The shape of an input or output of the batch, of which that of a microbatch is known."""
        if not shape:
            return shape
        times = [self.names.count if k == along else 1 for k in range(len(shape))]
        return tuple(
            dim * each if isinstance(dim, int) else self.dims.dim(dim, each)
            for dim, each in zip(shape, times, strict=True)
        )

    def _along(self, held: LocalTensor) -> int:
        """The dim of the records of an input or output."""
        return self.given.records[held.version.value] if self.given else 0

    def _shards(self, held: LocalTensor) -> int:
        return held.version.layout.num_shards(self._along(held))

    def deal(self, row: Row) -> None:
        """Gives each microbatch its records: of every piece of the batch a share, so that all ranks have the same ones."""
        if PART in row.unit.batch:
            for k, names in enumerate(row.micro):
                names[PART] = self.names.in_microbatch(PART, k)
                row.constants[names[PART]] = np.array(k, np.int64)
        cutting = self._cutting()
        for held in self.inputs(row.unit):
            made = [self.names.in_microbatch(held.name, k) for k in range(self.names.count)]
            for k, one in enumerate(made):
                row.micro[k][held.name] = one
                row.types[one] = row.types[held.name]
            cutting.cut(held.name, made, self._along(held), self.pieces // self._shards(held))
        self._cut(row, cutting)

    def _cutting(self) -> Cutting:
        return Cutting(self.names.of, self.opset)

    def _cut(self, row: Row, cutting: Cutting) -> None:
        row.steps += cutting.nodes
        row.constants |= cutting.constants

    def _join_records(self, row: Row) -> None:
        """The outputs of a step that does not train: what has records of microbatches is joined, the rest is the same in all of them."""
        cutting, known = self._cutting(), {held.name for held in self.outputs(row.unit)}
        for held in row.unit.program.outputs:
            parts = [names[held.name] for names in row.micro if held.name in names]
            if held.name in known:
                value, shape = row.unit.program.types[held.name]
                along = self._along(held)
                cutting.join(parts, held.name, along, self.pieces // self._shards(held))
                row.types[held.name] = value, self.shape(held, shape)
            elif parts and held.version.value not in self.values:
                row.emit("Identity", parts[:1], [held.name])
        self._cut(row, cutting)

    def join(self, row: Row, labels: Sequence[Label]) -> None:
        """The outputs of the step, and what replaces statistics, out of those of the microbatches."""
        if self.training is None:
            self._join_records(row)
            return
        like = row.unit.program
        wanted = {held.name: str(held.version.value.name) in self.training.summed for held in like.outputs}
        wanted |= {one.next: False for one in like.kept if one.kind == "statistics" and one.next}
        for step, label in zip(like.steps, labels, strict=True):
            summed = isinstance(step, CommOp) and str(step.value.name) in self.training.summed
            for name in read_names(step) if label == UPDATE and not row.unit.appends(step) else ():
                if name not in row.sums:
                    wanted.setdefault(name, summed)
        for name, summed in wanted.items():
            parts = [names[name] for names in row.micro if name in names]
            if len(parts) < self.names.count or name not in row.types:
                continue
            dtype = row.types[name][0].dtype
            if dtype is not None and not dtype.is_floating_point():
                row.emit("Identity", parts[:1], [name])  # a counter of steps
            else:
                row.put_together(parts, name, summed, self.names)
            for names in row.micro:
                del names[name]
