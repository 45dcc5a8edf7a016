"""Shapes of a rank's values are made of those of its inputs, at the begin: a rank then need not leave its target to compute with them.

    %s = Shape(%h)    of (batch, 4, 6)     ->     %x.size.0 = Shape(%x) {start: 0, end: 1}     %s = Concat(%x.size.0, [4, 6])

Every dim must be a number, or that of an input of the rank. What is computed with such shapes stands at the begin, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, Constant, RankOp, RankProgram, made_names, read_names
from partc.compiler.ir.value_info import Dim, Shape
from partc.compiler.ir.values import derived
from partc.compiler.ops.registry import draws
from partc.compiler.targets.of_ops import GROWING

_WITH_ENDS = 15
"""The opset from which Shape has a begin and an end."""


def with_shapes_of_inputs(program: Program, part: RankProgram) -> RankProgram:
    """The program with shapes that are made of its inputs', in front of all else."""
    if program.model.graph.opset_imports.get("", 1) < _WITH_ENDS:
        return part
    work = _Shapes(part)
    steps = [work.step(step) for step in part.steps]
    if not work.early:
        return part
    first, rest = _parted(
        [*work.early, *steps], {held.name for held in part.inputs}, {*part.constants, *work.constants}
    )
    return replace(part, steps=(*first, *rest), constants={**part.constants, **work.constants})


class _Shapes:
    def __init__(self, part: RankProgram) -> None:
        self.types = part.types
        self.dims: dict[Dim, tuple[str, int]] = {}
        for held in part.inputs:
            for axis, dim in enumerate(part.types[held.name][1] or ()):
                if isinstance(dim, str):
                    self.dims.setdefault(dim, (held.name, axis))
        self.taken = {name for step in part.steps for name in (*read_names(step), *made_names(step))} | {
            *part.constants
        }
        self.early: list[RankOp] = []
        self.constants: dict[str, Constant] = {}
        self.known: dict[object, str] = {}
        self.inputs = {held.name for held in part.inputs}

    def step(self, step: RankOp) -> RankOp:
        """The op, or in place of a Shape the one that joins the sizes."""
        if not isinstance(step, ComputeOp) or step.node.op_type != "Shape" or step.node.domain not in ("", "ai.onnx"):
            return step
        value = step.node.inputs[0]
        name = value.name or "" if value is not None else ""
        shape = self.types[name][1] if name in self.types else None
        if shape is None or name in self.inputs:
            return step
        dims = _asked(step.node, shape)
        if not dims or any(isinstance(dim, str) and dim not in self.dims for dim in dims):
            return step
        parts = [self._size(step, dim) for dim in dims]
        made = ir.Value(name=step.node.outputs[0].name, type=ir.TensorType(ir.DataType.INT64))
        node = ir.Node(
            "",
            "Concat",
            [ir.Value(name=name) for name in parts],
            [ir.AttrInt64("axis", 0)],
            outputs=[made],
            name=step.node.name,
        )
        # An op of its own: what has the sizes of a cut value is not cut, and other ranks may have no such inputs.
        return replace(step, node=node, source=node)

    def _size(self, step: ComputeOp, dim: Dim) -> str:
        """The name of a dim, as a vector of one number."""
        if dim in self.known:
            return self.known[dim]
        word = f"size.{dim}" if isinstance(dim, int) else "{}.size.{}".format(*self.dims[dim])
        name = derived(word, self.taken)
        self.taken.add(name)
        self.known[dim] = name
        if isinstance(dim, int):
            self.constants[name] = np.array([dim], np.int64)
            return name
        source, axis = self.dims[dim]
        ends = [ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1)]
        made = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
        node = ir.Node("", "Shape", [ir.Value(name=source)], ends, outputs=[made], name=name)
        self.early.append(ComputeOp(node, node))
        return name


def _asked(node: ir.Node, shape: Shape) -> Sequence[Dim]:
    """The dims that a Shape gives."""
    begin, end = node.attributes.get_int("start", 0), node.attributes.get("end")
    return shape[begin : end.as_int() if end is not None else None]


def _parted(steps: Sequence[RankOp], inputs: set[str], constants: set[str]) -> tuple[list[RankOp], list[RankOp]]:
    """The ops that compute with shapes of inputs alone, and the others, each in order."""
    numbers: set[str] = set()
    first: list[RankOp] = []
    rest: list[RankOp] = []
    for step in steps:
        if isinstance(step, ComputeOp) and _is_early(step, inputs, numbers, constants):
            numbers.update(made_names(step))
            first.append(step)
        else:
            rest.append(step)
    return first, rest


def _is_early(step: ComputeOp, inputs: set[str], numbers: set[str], constants: set[str]) -> bool:
    node, names = step.node, list(filter(None, read_names(step)))
    if node.op_type == "Shape":
        return all(name in inputs for name in names)
    if node.domain not in ("", "ai.onnx") or node.op_type in GROWING or draws(node) or step.captured:
        return False
    if node.op_type == "Cast" and ir.DataType(node.attributes.get_int("to")).is_floating_point():
        return False
    return any(name in numbers for name in names) and all(name in numbers or name in constants for name in names)
