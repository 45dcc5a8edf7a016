"""The loss scale in a training step: the factor of the seed, its inverse for the gradients, and its value in the next step.

A dynamic scale is state on every rank, as PyTorch's GradScaler has it:

    finite            the sum of the squares of all reduced gradients is: the same number on every rank
    loss_scale        backoff * it where not finite; growth * it after `interval` finite steps in a row; within 2^-24 .. 2^100
    loss_scale.steps  the finite steps since it last changed

The runtime changes nothing else in a step that is not finite (`TrainingRecord.guard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.value_info import Array
from partc.compiler.plan.precision import LARGEST, SMALLEST, LossScale

STATE, STEPS = "loss_scale", "loss_scale.steps"
_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


@dataclass(frozen=True)
class ScaleNodes:
    """Nodes over numbers of rank 0, the constants that they read, and what they make for others."""

    nodes: Sequence[ir.Node]
    constants: Mapping[ir.Value, Array]
    results: tuple[ir.Value, ...]


@dataclass(frozen=True)
class _Writer:
    """Writes nodes and constants, whose values are named after one."""

    base: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    constants: dict[ir.Value, Array] = field(default_factory=dict)

    def constant(self, word: str, items: Array | float, kind: ir.DataType = _FLOAT) -> ir.Value:
        """A constant of these items."""
        array = np.asarray(items, kind.numpy())
        value = number(f"{self.base.name}.{word}", kind, array.shape)
        self.constants[value] = array
        return value

    def compute(self, word: str, op_type: str, operands: Sequence[ir.Value], kind: ir.DataType) -> ir.Value:
        """Adds a node over numbers and returns its output."""
        return self.put(op_type, operands, number(f"{self.base.name}.{word}", kind))

    def put(self, op_type: str, operands: Sequence[ir.Value], made: ir.Value, **attributes: int) -> ir.Value:
        """Writes a node, and gives what it makes."""
        extra = ir.convenience.convert_attributes(attributes)
        self.nodes.append(ir.Node("", op_type, operands, extra, outputs=[made], name=made.name))
        return made


def seed_nodes(state: ir.Value, seed: ir.Value, factor: Array) -> ScaleNodes:
    """The nodes that make the first cotangent, the `factor` times the scale, in the loss's shape and type."""
    write = _Writer(seed)
    if seed.dtype == _FLOAT:
        write.put("Mul", [state, write.constant("factor", factor)], seed)
    else:
        wide = number(f"{seed.name}.float", _FLOAT, factor.shape)
        write.put("Mul", [state, write.constant("factor", factor)], wide)
        write.put("Cast", [wide], seed, to=int(seed.dtype or _FLOAT))
    return ScaleNodes(write.nodes, write.constants, (seed,))


def next_nodes(scale: LossScale, state: ir.Value, steps: ir.Value, total: ir.Value) -> ScaleNodes:
    """The nodes that make the next scale and the next count of steps out of both and of the sum of all squares."""
    write = _Writer(state)
    infinity, growth = write.constant("infinity", np.inf), write.constant("growth", scale.growth)
    backoff, largest = write.constant("backoff", scale.backoff), write.constant("largest", LARGEST)
    smallest, interval = write.constant("smallest", SMALLEST), write.constant("interval", scale.interval, _INT64)
    one, zero = write.constant("one", 1, _INT64), write.constant("zero", 0, _INT64)
    finite = write.compute("finite", "Less", [total, infinity], _BOOL)
    counted = write.compute("counted", "Add", [steps, one], _INT64)
    enough = write.compute("enough", "GreaterOrEqual", [counted, interval], _BOOL)
    larger = write.compute("larger", "Mul", [state, growth], _FLOAT)
    grown = write.compute("grown", "Min", [larger, largest], _FLOAT)
    smaller = write.compute("smaller", "Mul", [state, backoff], _FLOAT)
    shrunk = write.compute("shrunk", "Max", [smaller, smallest], _FLOAT)
    kept = write.compute("kept", "Where", [enough, grown, state], _FLOAT)
    next_state = write.compute("next", "Where", [finite, kept, shrunk], _FLOAT)
    going_on = write.compute("going_on", "Where", [enough, zero, counted], _INT64)
    next_steps = write.put("Where", [finite, going_on, zero], number(f"{steps.name}.next", _INT64))
    return ScaleNodes(write.nodes, write.constants, (next_state, next_steps))


def number(name: str, kind: ir.DataType, shape: Sequence[int] = ()) -> ir.Value:
    """A value of rank 0, or of dims of 1."""
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
