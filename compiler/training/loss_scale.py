"""The loss scale in a training step: the factor of the seed, its inverse for the gradients, and what it is in the next step.

A dynamic scale is state on every rank, as PyTorch's GradScaler has it:

    finite            the sum of the squares of all reduced gradients is: the same number on every rank
    loss_scale        backoff * it where not finite; growth * it after `interval` finite steps in a row; within 2^-24 .. 2^100
    loss_scale.steps  the finite steps since it last changed

The runtime changes nothing else in a step that is not finite (`TrainingRecord.guard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.value_info import Array
from partc.compiler.plan.precision import LARGEST, SMALLEST, LossScale

STATE, STEPS = "loss_scale", "loss_scale.steps"
_FLOAT, _INT64, _BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


@dataclass(frozen=True)
class ScaleNodes:
    """Nodes over numbers of rank 0, and the constants that they read."""

    nodes: Sequence[ir.Node]
    constants: Mapping[str, Array]


def seed_nodes(state: str, seed: str, number: float, shape: Sequence[int], kind: ir.DataType) -> ScaleNodes:
    """The nodes that make the first cotangent, `number` times the scale, in the loss's shape and type."""
    constants: dict[str, Array] = {f"{seed}.factor": np.full(tuple(shape), number, np.float32)}
    made = seed if kind == _FLOAT else f"{seed}.float"
    nodes = [_node("Mul", [state, f"{seed}.factor"], made, _FLOAT, shape)]
    if kind != _FLOAT:
        nodes.append(_node("Cast", [made], seed, kind, shape, to=int(kind)))
    return ScaleNodes(nodes, constants)


def next_nodes(scale: LossScale, state: str, steps: str, total: str) -> ScaleNodes:
    """The nodes that make `<state>.next` and `<steps>.next` out of both and of the sum of all squares."""

    def own(word: str) -> str:
        return f"{state}.{word}"

    constants: dict[str, Array] = {
        own("infinity"): np.array(np.inf, np.float32),
        own("growth"): np.array(scale.growth, np.float32),
        own("backoff"): np.array(scale.backoff, np.float32),
        own("largest"): np.array(LARGEST, np.float32),
        own("smallest"): np.array(SMALLEST, np.float32),
        own("interval"): np.array(scale.interval, np.int64),
        own("one"): np.array(1, np.int64),
        own("zero"): np.array(0, np.int64),
    }
    nodes = [
        _node("Less", [total, own("infinity")], own("finite"), _BOOL),
        _node("Add", [steps, own("one")], own("counted"), _INT64),
        _node("GreaterOrEqual", [own("counted"), own("interval")], own("enough"), _BOOL),
        _node("Mul", [state, own("growth")], own("larger"), _FLOAT),
        _node("Min", [own("larger"), own("largest")], own("grown"), _FLOAT),
        _node("Mul", [state, own("backoff")], own("smaller"), _FLOAT),
        _node("Max", [own("smaller"), own("smallest")], own("shrunk"), _FLOAT),
        _node("Where", [own("enough"), own("grown"), state], own("kept"), _FLOAT),
        _node("Where", [own("finite"), own("kept"), own("shrunk")], f"{state}.next", _FLOAT),
        _node("Where", [own("enough"), own("zero"), own("counted")], own("going_on"), _INT64),
        _node("Where", [own("finite"), own("going_on"), own("zero")], f"{steps}.next", _INT64),
    ]
    return ScaleNodes(nodes, constants)


def number(name: str, kind: ir.DataType, shape: Sequence[int] = ()) -> ir.Value:
    """A value of rank 0, or of dims of 1."""
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))


def _node(
    op_type: str, names: Sequence[str], made: str, kind: ir.DataType, shape: Sequence[int] = (), **attributes: int
) -> ir.Node:
    extra = ir.convenience.convert_attributes(attributes)
    operands = [ir.Value(name=name) for name in names]
    return ir.Node("", op_type, operands, extra, outputs=[number(made, kind, shape)], name=made)
