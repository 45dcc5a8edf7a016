"""Nodes that are constants become constants of the rank's program: these lie wherever they are read, and every session sees them.

A constant that is an output, or that a task gives, stays a node; so does one that numpy has no type for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import onnx_ir as ir
from partc.compiler.ir.programs import Body, Call, Comm, Compute, Op, RankProgram, Value, exchanged, with_values
from partc.compiler.ir.value_info import Array

OneOp = TypeVar("OneOp", bound=Op)
_PLAIN = frozenset(
    kind
    for kind in ir.DataType
    if kind.name
    in ("FLOAT", "DOUBLE", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)


def with_constants(part: RankProgram) -> RankProgram:
    """The program with constants in place of ops Constant."""
    found: dict[Value, Value] = {}
    bodies: dict[Body, Body] = {}
    for body in part.bodies:
        inside = [step for step in _without(body.steps, body.outputs, found) if not isinstance(step, Call)]
        bodies[body] = replace(body, steps=tuple(inside))
    given = {*part.results, *(value for step in part.steps if isinstance(step, Call) for value in step.inputs)}
    steps = _without(part.steps, given, found)
    if not found:
        return part
    bodies = {old: replace(new, steps=tuple(_over(step, found) for step in new.steps)) for old, new in bodies.items()}
    steps = [replace(step, body=bodies[step.body]) if isinstance(step, Call) else step for step in steps]
    return replace(part, steps=tuple(_over(step, found) for step in steps))


def _without(steps: Sequence[Op], given: Collection[Value], found: dict[Value, Value]) -> list[Op]:
    """The ops without constants, whose values `found` gets as constants; but for those that are `given` to others."""
    kept: list[Op] = []
    for step in steps:
        array = _array(step) if isinstance(step, Compute) and not step.captured else None
        if array is None or any(value in given for value in step.makes):
            kept.append(step)
        else:
            (value,) = step.makes
            found[value] = replace(value, constant=array)
    return kept


def _over(step: OneOp, values: Mapping[Value, Value]) -> OneOp | Compute | Comm:
    """The op, which reads constants in place of what ops gave."""
    if isinstance(step, Compute):
        return with_values(step, values)
    return replace(step, inputs=exchanged(step.inputs, values)) if isinstance(step, Comm) else step


def _array(step: Compute) -> Array | None:
    """The value of a constant; None for any other op."""
    if not step.is_op("Constant") or not step.makes:
        return None
    tensor = ir.convenience.get_const_tensor(step.node.outputs[0])
    return tensor.numpy() if tensor is not None and tensor.dtype in _PLAIN else None
