"""The nodes that compute one parameter's update by an optimizer.

    update_steps(optimizer("momentum", {"lr": 0.01}), weight, gradient, slots, scalars, outputs, shape=(64, 32))

Most are one node a parameter, element by element, so that a shard of a parameter, or of a flat buffer of many, is updated as the whole is.
Some are several, with sums in the middle that need all shards (`whole_updates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.plan.training.optimizer_kind import ByRows
from partc.compiler.training.optimizer_functions import DOMAIN, FAMILIES, function, variant
from partc.compiler.training.whole_updates import WHOLE_UPDATES, Step, WholeUpdate
from partc.runtime.artifact.graph.row_function import IDS, MERGE, ROWS, adds_up


def update_steps(
    optimizer: Optimizer,
    parameter: ir.Value,
    gradient: ir.Value,
    slots: Sequence[ir.Value],
    scalars: Mapping[str, ir.Value],
    outputs: Sequence[ir.Value],
    *,
    weight_decay: float | None = None,
    lr_multiplier: float = 1.0,
    clip_value: float = 0.0,
    shape: Sequence[int] = (),
    cut: Collection[int] = (),
) -> list[Step]:
    """The nodes that make `outputs`, the next parameter and slots, and the sums over shards between them, in order.

    `scalars` are by name; with `scale` among them the gradient is first multiplied with it. `weight_decay` is the optimizer's own
    if None; `clip_value` 0 clips nothing. `shape` is that of the whole parameter, of which ranks have shards along the dims `cut`. The
    functions that the nodes call are `functions(node.op_type for ...)`. Raises CompileError for a parameter that is not float32 or float64.
    """
    _check_type(parameter)
    decay = optimizer.weight_decay if weight_decay is None else weight_decay
    numbers = _numbers(optimizer, decay, lr_multiplier, clip_value)
    call = _Call(parameter, {**numbers, **_sizes(shape)}, scalars)
    names = optimizer.slots_of(len(shape))
    inputs = {"parameter": parameter, "gradient": gradient, **dict(zip(names, slots, strict=True))}
    if optimizer.is_elementwise:
        return [call.node(optimizer.form.function, inputs, outputs, "update")]
    return WHOLE_UPDATES[optimizer.type](WholeUpdate(call, inputs, outputs, tuple(shape), cut))


def _sizes(shape: Sequence[int]) -> dict[str, float]:
    """The sizes of a parameter that functions have as attributes."""
    rows, columns = (1, 1, *shape)[-2:]
    sizes = {"elements": math.prod(shape), "rows": rows, "columns": columns, "row": math.prod(shape[1:])}
    return {name: float(size) for name, size in sizes.items()}


def row_update_node(
    optimizer: Optimizer,
    parameter: ir.Value,
    ids: ir.Value,
    rows: ir.Value,
    slots: Sequence[ir.Value],
    scalars: Mapping[str, ir.Value],
    outputs: Sequence[ir.Value],
    *,
    weight_decay: float | None = None,
    lr_multiplier: float = 1.0,
    clip_value: float = 0.0,
) -> ir.Node:
    """The node that updates the rows `ids` of a parameter and its slots by the gradient `rows`; as `update_steps` otherwise."""
    _check_type(parameter)
    decay = optimizer.weight_decay if weight_decay is None else weight_decay
    call = _Call(parameter, _numbers(optimizer, decay, lr_multiplier, clip_value), scalars)
    tables = {"parameter": parameter, **dict(zip(optimizer.slots, slots, strict=True))}
    return call.node(f"{optimizer.form.function}Rows", {**tables, IDS: ids, ROWS: rows}, outputs, "update")


def takes_rows_again(family: str, clipped: bool) -> bool:
    """Whether a family's function over rows takes an id that stands there several times as it does the sum of its rows."""
    return adds_up(function(variant(f"{family}Rows", clipped=clipped)))


def merge_node(ids: ir.Value, rows: ir.Value, outputs: Sequence[ir.Value]) -> ir.Node:
    """The node that gives each of the ids once, with the sum of its rows."""
    return ir.Node(DOMAIN, MERGE, [ids, rows], outputs=outputs, name=f"{outputs[1].name}")


def whole_table(optimizer: Optimizer, weight_decay: float | None) -> str:
    """Why an update changes rows without a gradient, too, so that it needs the whole gradient; empty where it does not."""
    decay = optimizer.weight_decay if weight_decay is None else weight_decay
    if optimizer.by_rows is ByRows.NEVER:
        return f"{optimizer.type} changes all rows in every step"
    if optimizer.by_rows is ByRows.ALIKE and decay:
        return f"the weight decay of {optimizer.type} changes all rows in every step"
    return ""


def _check_type(parameter: ir.Value) -> None:
    if parameter.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        kind = "unknown" if parameter.dtype is None else parameter.dtype.name.lower()
        raise CompileError(
            Problem(
                f"parameter '{parameter.name}'",
                f"its type is {kind}, which no optimizer updates",
                "parameters are trained in float32 or float64",
                "freeze it, or give the model float32 weights",
            )
        )


def _numbers(optimizer: Optimizer, weight_decay: float, lr_multiplier: float, clip_value: float) -> dict[str, float]:
    rest = {f"one_minus_{name}": 1 - value for name, value in optimizer.hyper.items()}
    negated = {f"minus_{name}": -value for name, value in optimizer.hyper.items()}
    own = {"weight_decay": weight_decay, "lr_multiplier": lr_multiplier, "clip_value": clip_value}
    return {**optimizer.hyper, **rest, **negated, **own, "rate": optimizer.lr * lr_multiplier}


_PLAIN = frozenset(("LambSquares", "AdafactorSquares", "AdafactorTotal"))
"""Functions without any number of a type."""


@dataclass(frozen=True)
class _Call:
    """Makes the nodes of one parameter's update: the variant of a function that is needed, with the attributes that it has."""

    parameter: ir.Value
    numbers: Mapping[str, float]
    scalars: Mapping[str, ir.Value]

    def node(self, family: str, inputs: Mapping[str, ir.Value], outputs: Sequence[ir.Value], part: str) -> ir.Node:
        row = FAMILIES[family]
        reads_gradient = not {"gradient", ROWS}.isdisjoint(row.inputs)
        called = function(
            variant(
                family,
                scaled=reads_gradient and "scale" in self.scalars,
                clipped=reads_gradient and self.numbers["clip_value"] > 0,
                decayed=row.decays and self.numbers["weight_decay"] > 0,
                double=self.parameter.dtype == ir.DataType.DOUBLE and (reads_gradient or family not in _PLAIN),
            )
        )
        given = {**self.scalars, **inputs}
        attributes = [ir.AttrFloat32(name, self.numbers[name]) for name in sorted(called.attribute)]
        values = [given[name] for name in called.input]
        return ir.Node(DOMAIN, called.name, values, attributes, outputs=outputs, name=f"{self.parameter.name}.{part}")

    def value(self, part: str, shape: ir.Shape | None) -> ir.Value:
        return ir.Value(name=f"{self.parameter.name}.{part}", shape=shape, type=self.parameter.type)


def clip_scale(total: ir.Value, scale: ir.Value, max_norm: float) -> ir.Node:
    """The node that makes `scale`, with which gradients have at most the norm `max_norm`, out of the sum of all their squares."""
    attributes = [ir.AttrFloat32("max_norm", max_norm)]
    return ir.Node(DOMAIN, "ClipScale", [total], attributes, outputs=[scale], name=scale.name)
