"""Shapes of a rank's values are made of those of its inputs, at the begin: a rank then need not leave its target to compute with them.

    %s = Shape(%h)    of (batch, 4, 6)     ->     %x.size.0 = Shape(%x) {start: 0, end: 1}     %s = Concat(%x.size.0, [4, 6])

Every dim must be a number, or that of an input of the rank. What is computed with such shapes stands at the begin, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.program import Scheduled
from partc.compiler.ir.programs import Compute, Op, RankProgram, Value, added
from partc.compiler.ir.value_info import Dim
from partc.compiler.ops.registry import draws
from partc.compiler.targets.of_ops import GROWING

_WITH_ENDS = 15
"""The opset from which Shape has a begin and an end."""


def with_shapes_of_inputs(program: Scheduled, part: RankProgram) -> RankProgram:
    """The program with shapes that are made of its inputs', in front of all else."""
    if program.model.graph.opset_imports.get("", 1) < _WITH_ENDS:
        return part
    work = _Shapes(part)
    steps = [work.step(step) for step in part.steps]
    if not work.early:
        return part
    first, rest = _parted([*work.early, *steps], work.inputs)
    return replace(part, steps=(*first, *rest))


class _Shapes:
    def __init__(self, part: RankProgram) -> None:
        self.dims: dict[Dim, tuple[Value, int]] = {}
        for held in part.inputs:
            for axis, dim in enumerate(held.value.shape or ()):
                if isinstance(dim, str):
                    self.dims.setdefault(dim, (held.value, axis))
        self.early: list[Op] = []
        self.known: dict[object, Value] = {}
        self.inputs = {held.value for held in part.inputs}

    def step(self, step: Op) -> Op:
        """The op, or in place of a Shape the one that joins the sizes."""
        if not isinstance(step, Compute) or not step.is_op("Shape") or step.inputs[0] is None:
            return step
        shape = step.inputs[0].shape
        if shape is None or step.inputs[0] in self.inputs:
            return step
        begin, end = step.node.attributes.get_int("start", 0), step.node.attributes.get("end")
        dims = shape[begin : end.as_int() if end is not None else None]
        if not dims or any(isinstance(dim, str) and dim not in self.dims for dim in dims):
            return step
        # An op of its own: what has the sizes of a cut value is not cut, and other ranks may have no such inputs.
        made = added("Concat", [self._size(dim) for dim in dims], step.makes, {"axis": 0})
        return replace(step, node=made.node, source=made.node, inputs=made.inputs)

    def _size(self, dim: Dim) -> Value:
        """A dim, as a vector of one number."""
        if dim in self.known:
            return self.known[dim]
        if isinstance(dim, int):
            made = Value(f"size.{dim}", constant=np.array([dim], np.int64))
        else:
            source, axis = self.dims[dim]
            made = source.derived_untyped(f".size.{axis}")
            self.early.append(added("Shape", [source], [made], {"start": axis, "end": axis + 1}))
        self.known[dim] = made
        return made


def _parted(steps: Sequence[Op], inputs: set[Value]) -> tuple[list[Op], list[Op]]:
    """The ops that compute with shapes of inputs alone, and the others, each in order."""
    numbers: set[Value] = set()
    first: list[Op] = []
    rest: list[Op] = []
    for step in steps:
        if isinstance(step, Compute) and _is_early(step, inputs, numbers):
            numbers.update(step.makes)
            first.append(step)
        else:
            rest.append(step)
    return first, rest


def _is_early(step: Compute, inputs: set[Value], numbers: set[Value]) -> bool:
    if step.node.op_type == "Shape":
        return all(value in inputs for value in step.reads)
    if step.node.domain not in ("", "ai.onnx") or step.node.op_type in GROWING or draws(step.node) or step.captured:
        return False
    if step.node.op_type == "Cast" and ir.DataType(step.node.attributes.get_int("to")).is_floating_point():
        return False
    reads = step.reads
    return any(value in numbers for value in reads) and all(
        value in numbers or value.constant is not None for value in reads
    )
