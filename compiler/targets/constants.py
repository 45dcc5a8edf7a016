"""Nodes that are constants become constants of the rank's program: these lie wherever they are read, and every session sees them.

A constant that is an output, or that a task gives, stays a node; so does one that numpy has no type for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ir.rank_program import ComputeOp, Constant, RankOp, RankProgram, TaskBody, TaskCall
from partc.compiler.ir.value_info import Array

_PLAIN = frozenset(
    kind
    for kind in ir.DataType
    if kind.name
    in ("FLOAT", "DOUBLE", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)


def with_constants(part: RankProgram) -> RankProgram:
    """The program with constants in place of nodes of the op Constant."""
    found: dict[str, Constant] = {}
    bodies: dict[TaskBody, TaskBody] = {}
    for body in part.bodies:
        inside = [step for step in _without(body.steps, body.outputs, found) if not isinstance(step, TaskCall)]
        bodies[body] = replace(body, steps=tuple(inside)) if len(inside) < len(body.steps) else body
    given = {*(held.name for held in part.outputs), *(one.next for one in part.kept)}
    given.update(name for step in part.steps if isinstance(step, TaskCall) for name in step.inputs)
    steps = _without(part.steps, given, found)
    if not found:
        return part
    steps = [replace(step, body=bodies[step.body]) if isinstance(step, TaskCall) else step for step in steps]
    return replace(part, steps=tuple(steps), constants={**part.constants, **found})


def _without(steps: Sequence[RankOp], given: Collection[str], found: dict[str, Constant]) -> list[RankOp]:
    """The ops without constants, which `found` gets; but for those that are `given` to others."""
    kept: list[RankOp] = []
    for step in steps:
        array = _array(step) if isinstance(step, ComputeOp) and not step.captured else None
        name = step.node.outputs[0].name if isinstance(step, ComputeOp) and step.node.outputs else None
        if array is None or not name or name in given:
            kept.append(step)
        else:
            found[name] = array
    return kept


def _array(step: ComputeOp) -> Array | None:
    """The value of a constant; None for any other op."""
    node = step.node
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    return tensor.numpy() if tensor is not None and tensor.dtype in _PLAIN else None
