"""Nodes that onnxruntime has no CPU kernel for in 16 bits compute in float32, between Casts; a vector is multiplied as a column.

    %h = MatMul(%x, %w)     ->     %h.unrounded = MatMul(%x.read, %w.read);  %h = Cast(%h.unrounded)

All but what moves elements does so in bfloat16, which onnxruntime then loads, and most in float16, where it would put Casts around
nodes itself, and take those out that follow each other: nothing would be rounded within a session, and no sum leave the range of float16.
With Casts of its own a program gives the same numbers wherever it is cut. A value that several nodes of a task read is cast once.

A Transpose before a MatMul becomes a `FusedMatMul` in onnxruntime, which multiplies a transposed left operand and a vector wrongly. Which
nodes come to stand next to each other there (it takes out each Identity between) a compiler cannot know, so each vector becomes a column:

    %y = MatMul(%a, %v)     ->     %v.column = Unsqueeze(%v, [1]);  %y.column = MatMul(%a, %v.column);  %y = Squeeze(%y.column, [-1])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx.defs
import onnx_ir as ir
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.programs import Comm, Compute, Op, RankProgram, Value, added, with_values
from partc.compiler.ir.value_info import ValueInfo
from partc.runtime.artifact.format import CUDA
from partc.runtime.artifact.graph.half_kernels import has_kernel


def fit_kernels(
    program: RankProgram,
    halves: Collection[ir.DataType],
    opset: int,
    values: dict[ir.Value, ValueInfo],
    targets: Mapping[ir.Node, str],
) -> RankProgram:
    """The program with Casts around nodes that have no kernel in types of 16 bits, the `halves`; what they make is listed in `values`.

    `targets` are those of the model's nodes: a node on cuda has kernels; one on the device of the job may run on a CPU.
    """
    work = _Fitting(program, halves, opset, values, targets)
    steps = [one for step in program.steps for one in work.step(step)]
    return replace(program, steps=tuple(steps)) if work.changed else program


def columns_of_vectors(steps: Sequence[Compute | Comm]) -> Sequence[Compute | Comm]:
    """The steps, where no MatMul has a vector as its right operand, but for a product of two vectors."""
    rewritten: list[Compute | Comm] = []
    for step in steps:
        if not isinstance(step, Compute) or not step.is_op("MatMul") or step.node.domain not in ("", "ai.onnx"):
            rewritten.append(step)
            continue
        (left, right), (out,) = step.inputs, step.outputs
        if left is None or right is None or out is None or _rank(right) != 1 or _rank(left) == 1:
            rewritten.append(step)
            continue
        column, product = Value(".column", out), out.derived_untyped(".product")
        before = added("Unsqueeze", [right, column.derived_untyped(".axes", np.array([1], np.int64))], [column])
        after = added("Squeeze", [product, product.derived_untyped(".axes", np.array([-1], np.int64))], [out])
        multiplied = replace(step, inputs=(left, column), outputs=(product,))
        rewritten += [
            replace(one, source=step.source, task=step.task, target=step.target) for one in (before, multiplied, after)
        ]
    return rewritten


def _rank(value: Value) -> int | None:
    if value.constant is not None:
        return len(value.constant.shape)
    shape = value.shape if value.shape is not None or value.of is None else value.of.shape
    return None if shape is None else len(shape)


@dataclass
class _Fitting:
    program: RankProgram
    halves: Collection[ir.DataType]
    opset: int
    values: dict[ir.Value, ValueInfo]
    targets: Mapping[ir.Node, str]

    def __post_init__(self) -> None:
        program = self.program
        self.changed = False
        there = {*program.live_in, *(one for step in program.steps for one in (*step.reads, *step.makes))}
        self.known: dict[Value, ir.DataType | None] = {one: one.of.dtype for one in there if one.of is not None}
        self.known |= {one: ir.DataType.from_numpy(one.constant.dtype) for one in there if one.constant is not None}
        self.known |= dict.fromkeys(program.scalars, ir.DataType.FLOAT)
        self.read: dict[tuple[Value, str], Value] = {}

    def step(self, step: Op) -> Sequence[Op]:
        """The ops in place of one."""
        if not isinstance(step, Compute) or step.node.domain not in ("", "ai.onnx"):
            return [step]
        node = step.node
        for value, kind in _inferred(step, self.known, self.opset):
            self.known.setdefault(value, kind)
        read, defined = sorted({one for one in step.inputs if one is not None}, key=str), step.makes
        halves = [one for one in (*read, *defined) if self.known.get(one) in self.halves]
        if not halves or bodies(node) or CUDA in (step.target, self.targets.get(step.source)):
            return [step]
        reduction = str(node.attributes.get_string("reduction", "none"))
        kinds = [kind for one in halves if (kind := self.known[one]) is not None]
        if all(has_kernel(node.op_type, reduction, kind) for kind in kinds):
            return [step]
        self.changed = True
        before: list[Op] = []
        new: dict[Value, Value] = {}
        for half_value in halves:
            if half_value in read:
                key = half_value, step.task.value
                if key not in self.read:
                    self.read[key] = self._new(half_value, "read")
                    before.append(self._cast(step, half_value, self.read[key], ir.DataType.FLOAT))
                new[half_value] = self.read[key]
        after: list[Op] = []
        for half_value in halves:
            kind = self.known[half_value]
            if half_value in defined and kind is not None:
                new[half_value] = self._new(half_value, "unrounded")
                after.append(self._cast(step, new[half_value], half_value, kind))
        return [*before, with_values(step, new), *after]

    def _new(self, value: Value, word: str) -> Value:
        widened = value.derived_untyped(f".{word}")
        if value.of is not None:
            widened.of = ir.Value(name=str(widened), type=ir.TensorType(ir.DataType.FLOAT), shape=value.of.shape)
            widened.shape = value.shape
            self.values[widened.of] = ValueInfo("tensor(float)", value.shape, 4)
        self.known[widened] = ir.DataType.FLOAT
        return widened

    def _cast(self, step: Compute, given: Value, made: Value, kind: ir.DataType) -> Compute:
        cast = added("Cast", [given], [made], {"to": int(kind)})
        return replace(cast, source=step.source, task=step.task)


def _inferred(
    step: Compute, known: Mapping[Value, ir.DataType | None], opset: int
) -> list[tuple[Value, ir.DataType | None]]:
    """The types of what an op makes, as its schema gives them."""
    node = step.node
    if node.op_type == "Cast":
        return [(step.makes[0], ir.DataType(node.attributes.get_int("to")))]
    value = node.attributes.get("value")
    if node.op_type in ("Constant", "ConstantOfShape"):
        return [(step.makes[0], value.as_tensor().dtype if value is not None else ir.DataType.FLOAT)]
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return []
    kinds: dict[str, ir.DataType | None] = {}
    for k, operand in enumerate(step.inputs):
        if operand is not None and schema.inputs:
            kinds.setdefault(schema.inputs[min(k, len(schema.inputs) - 1)].type_str, known.get(operand))
    return [
        (out, kinds.get(schema.outputs[min(k, len(schema.outputs) - 1)].type_str))
        for k, out in enumerate(step.outputs)
        if out is not None and schema.outputs
    ]
