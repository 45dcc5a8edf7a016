"""Nodes that onnxruntime has no CPU kernel for in 16 bits compute in float32, between Casts.

    %h = MatMul(%x, %w)     ->     %h.unrounded = MatMul(%x.read, %w.read);  %h = Cast(%h.unrounded)

All but what moves elements does so in bfloat16, which onnxruntime then loads, and most in float16, where it would put Casts around
nodes itself, and take those out that follow each other: nothing would be rounded within a session, and no sum leave the range of float16.
With Casts of its own a program gives the same numbers wherever it is cut. A value that several nodes of a task read is cast once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx.defs
import onnx_ir as ir
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.rank_program import ComputeOp, RankOp, RankProgram, with_names
from partc.compiler.ir.value_info import Shape, ValueInfo
from partc.compiler.ir.values import derived
from partc.runtime.artifact.format import CUDA
from partc.runtime.artifact.half_kernels import has_kernel

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def fit_kernels(
    program: RankProgram, opset: int, values: dict[ir.Value, ValueInfo], targets: Mapping[ir.Node, str]
) -> RankProgram:
    """The program with Casts around nodes that have no kernel; what they make is listed in `values`.

    `targets` are those of the model's nodes: a node on cuda has kernels; one on the device of the job may run on a CPU.
    """
    work = _Fitting(program, opset, values, targets)
    steps = [one for step in program.steps for one in work.step(step)]
    if not work.changed:
        return program
    return replace(program, steps=tuple(steps), types={**program.types, **work.types})


@dataclass
class _Fitting:
    program: RankProgram
    opset: int
    values: dict[ir.Value, ValueInfo]
    targets: Mapping[ir.Node, str]

    def __post_init__(self) -> None:
        program = self.program
        self.changed = False
        self.types: dict[str, tuple[ir.Value, Shape | None]] = {}
        self.known: dict[str, ir.DataType | None] = {name: value.dtype for name, (value, _) in program.types.items()}
        self.known |= {name: ir.DataType.from_numpy(array.dtype) for name, array in program.constants.items()}
        self.known |= dict.fromkeys(program.scalars, ir.DataType.FLOAT)
        self.names = {*self.known, *(out.name or "" for step in program.steps for out in _made(step))}
        self.read: dict[tuple[str, str], str] = {}

    def step(self, step: RankOp) -> Sequence[RankOp]:
        """The ops in place of one."""
        if not isinstance(step, ComputeOp) or step.node.domain not in ("", "ai.onnx"):
            return [step]
        node = step.node
        for name, kind in _inferred(node, self.known, self.opset):
            self.known.setdefault(name, kind)
        read = {value.name or "" for value in node.inputs if value is not None}
        made = [out.name or "" for out in node.outputs if out.name]
        halves = [name for name in (*sorted(read), *made) if self.known.get(name) in _HALVES]
        if not halves or bodies(node) or all(self._has_kernel(node, self.known[name]) for name in halves):
            return [step]
        if CUDA in (step.target, self.targets.get(step.source)):
            return [step]
        self.changed = True
        before: list[RankOp] = []
        names = {}
        for name in halves:
            if name in read:
                key = name, step.task.value
                if key not in self.read:
                    self.read[key] = self._new(name, "read")
                    before.append(self._cast(step, name, self.read[key], ir.DataType.FLOAT))
                names[name] = self.read[key]
        after: list[RankOp] = []
        for name in halves:
            kind = self.known[name]
            if name in made and kind is not None:
                names[name] = self._new(name, "unrounded")
                after.append(self._cast(step, names[name], name, kind))
        return [*before, replace(step, node=with_names(node, names)), *after]

    def _has_kernel(self, node: ir.Node, kind: ir.DataType | None) -> bool:
        reduction = str(node.attributes.get_string("reduction", "none"))
        return kind is not None and has_kernel(node.op_type, reduction, kind)

    def _new(self, name: str, word: str) -> str:
        found = derived(f"{name}.{word}", self.names)
        self.names.add(found)
        self.known[found] = ir.DataType.FLOAT
        if name in self.program.types:
            value, shape = self.program.types[name]
            made = ir.Value(name=found, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
            self.values[made] = ValueInfo("tensor(float)", shape, 4)
            self.types[found] = made, shape
        return found

    def _cast(self, step: ComputeOp, name: str, made: str, kind: ir.DataType) -> ComputeOp:
        out = ir.Value(name=made, type=ir.TensorType(kind))
        node = ir.Node("", "Cast", [ir.Value(name=name)], [ir.AttrInt64("to", int(kind))], outputs=[out], name=made)
        return ComputeOp(node, step.source, task=step.task)


def _made(step: RankOp) -> Sequence[ir.Value]:
    return step.node.outputs if isinstance(step, ComputeOp) else ()


def _inferred(
    node: ir.Node, known: Mapping[str, ir.DataType | None], opset: int
) -> list[tuple[str, ir.DataType | None]]:
    """The types of a node's outputs, as its op's schema gives them."""
    if node.op_type == "Cast":
        return [(node.outputs[0].name or "", ir.DataType(node.attributes.get_int("to")))]
    value = node.attributes.get("value")
    if node.op_type in ("Constant", "ConstantOfShape"):
        return [(node.outputs[0].name or "", value.as_tensor().dtype if value is not None else ir.DataType.FLOAT)]
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return []
    kinds: dict[str, ir.DataType | None] = {}
    for k, operand in enumerate(node.inputs):
        if operand is not None and schema.inputs:
            kinds.setdefault(schema.inputs[min(k, len(schema.inputs) - 1)].type_str, known.get(operand.name or ""))
    return [
        (out.name or "", kinds.get(schema.outputs[min(k, len(schema.outputs) - 1)].type_str))
        for k, out in enumerate(node.outputs)
        if out.name and schema.outputs
    ]
