"""The nodes that compute one parameter's update by an optimizer.

    update_steps(optimizer("momentum", {"lr": 0.01}), weight, gradient, slots, scalars, outputs, shape=(64, 32))

Most are one node a parameter, element by element, so that a shard of a parameter, or of a flat buffer of many, is updated as the whole is.
Some are several, with sums in the middle that need all shards.

Updates that need sums over all of a parameter: norms, or the means of rows and columns of a matrix.

Of a cut parameter a shard has terms of such a sum, which other nodes add up over ranks; a `ShardSum` stands where they do:

    %w.squares = partc.optimizer::LambSquares(%w, %w.direction)
    ShardSum(%w.squares -> %w.squares.whole, dims 0 and 1)
    %w.ratio = partc.optimizer::LambRatio(%w.squares.whole)

Each function is told which dims other ranks have shards of (`cut`): a sum over others alone is whole where it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.plan.training.optimizer_kind import ByRows
from partc.compiler.training.optimizer_functions import DOMAIN, FAMILIES, function, variant
from partc.runtime.artifact.graph.row_function import IDS, MERGE, ROWS, adds_up


class Call(Protocol):
    """Makes the nodes of one parameter's update, and values that they share."""

    def node(self, family: str, inputs: Mapping[str, ir.Value], outputs: Sequence[ir.Value], part: str) -> ir.Node:
        """A call of the variant of a function that is needed; `part` ends its name."""
        ...

    def value(self, part: str, shape: ir.Shape | None) -> ir.Value:
        """A value of the parameter's type, named after it and `part`."""
        ...


@dataclass(frozen=True)
class ShardSum:
    """A sum over dims of the parameter: `terms` are what a rank has of its shard; `total` is the sum, or the terms where these are it.

    Along `ones` the terms have one element; without any they are a vector of sums over all dims.
    """

    terms: ir.Value
    total: ir.Value
    dims: tuple[int, ...]
    ones: tuple[int, ...] = ()


Step: TypeAlias = ir.Node | ShardSum


@dataclass(frozen=True)
class WholeUpdate:
    """One parameter's update: `tensors` are the parameter, its gradient and slots by name; `outputs` the next parameter and slots.

    `shape` is that of the whole parameter.
    """

    call: Call
    tensors: Mapping[str, ir.Value]
    outputs: Sequence[ir.Value]
    shape: tuple[int, ...]
    cut: Collection[int]

    def summed(self, terms: ir.Value, dims: Sequence[int], ones: Sequence[int] = ()) -> ShardSum:
        """The sum of terms, which have one element along `ones`, over the shards along some dims."""
        dims, ones = (tuple(dim % len(self.shape) for dim in some) for some in (dims, ones))
        total = terms
        if not {*dims}.isdisjoint(self.cut):
            total = ir.Value(name=f"{terms.name}.whole", type=terms.type, shape=terms.shape)
        return ShardSum(terms, total, dims, ones)

    def value(self, part: str, ones: Sequence[int] = ()) -> ir.Value:
        """A value of the parameter's shape here, but for dims of one element."""
        shape = self.tensors["parameter"].shape
        if shape is None:
            return self.call.value(part, None)
        return self.call.value(part, ir.Shape([1 if k - len(shape) in ones else dim for k, dim in enumerate(shape)]))


def lamb(update: WholeUpdate) -> list[Step]:
    """You et al. 2020, algorithm 2: the direction of AdamW, scaled by the norm of the parameter over its own."""
    call, direction = update.call, update.value("direction")
    both = {"parameter": update.tensors["parameter"], "direction": direction}
    first = call.node("LambDirection", update.tensors, [direction, *update.outputs[1:]], "direction")
    return [first, *_scaled(update, both, "LambSquares", "LambRatio", "LambApply", update.outputs[:1])]


def lars(one: WholeUpdate) -> list[Step]:
    """You et al. 2017, algorithm 1: momentum, whose rate is scaled by the norm of the parameter over that of its gradient."""
    return _scaled(one, one.tensors, "LarsSquares", "LarsRatio", "LarsApply", one.outputs)


def adafactor(update: WholeUpdate) -> list[Step]:
    """Shazeer and Stern 2018: the squares of a matrix's gradients are kept by row and by column."""
    call, tensors, direction = update.call, update.tensors, update.value("direction")
    both = {"parameter": tensors["parameter"], "direction": direction}
    apply = _scaled(update, both, "AdafactorSquares", "AdafactorRatio", "AdafactorApply", update.outputs[:1])
    if len(update.shape) < 2:
        return [call.node("AdafactorVector", tensors, [direction, *update.outputs[1:]], "direction"), *apply]
    axes = {"row_var": (-1,), "col_var": (-2,)}
    terms = [update.value(name, dims) for name, dims in zip(("row_means", "column_means"), axes.values(), strict=True)]
    means = [update.summed(value, dims, dims) for value, dims in zip(terms, axes.values(), strict=True)]
    now = {slot: update.value(f"{slot}.current", dims) for slot, dims in axes.items()}
    moments = [
        call.node(
            "AdafactorMoment", {"moment": tensors[slot], "means": mean.total}, [now[slot], following], f"{slot}.update"
        )
        for slot, mean, following in zip(axes, means, update.outputs[1:], strict=True)
    ]
    total = update.summed(update.value("total", (-1, -2)), (-2,), (-1, -2))
    operands = {"gradient": tensors["gradient"], **now, "total": total.total}
    return [
        call.node("AdafactorMeans", tensors, terms, "means"),
        *means,
        *moments,
        call.node("AdafactorTotal", now, [total.terms], "total"),
        total,
        call.node("AdafactorDirection", operands, [direction], "direction"),
        *apply,
    ]


def row_adagrad(update: WholeUpdate) -> list[Step]:
    """Adagrad with one number a row: the mean of the squares of the row's gradient."""
    call, tensors, direction = update.call, update.tensors, update.value("direction")
    if len(update.shape) < 2:
        return [call.node("Adagrad", tensors, update.outputs, "update")]
    dims = tuple(range(1 - len(update.shape), 0))
    mean = update.summed(update.value("row_means", dims), dims, dims)
    now = update.value("sum.current", dims)
    return [
        call.node("RowAdagradMeans", tensors, [mean.terms], "means"),
        mean,
        call.node(
            "RowAdagradSum", {"sum": tensors["sum"], "means": mean.total}, [now, update.outputs[1]], "sum.update"
        ),
        call.node("RowAdagradDirection", {**tensors, "current": now}, [direction], "direction"),
        call.node("RowAdagradApply", {**tensors, "direction": direction}, update.outputs[:1], "update"),
    ]


def _scaled(
    update: WholeUpdate,
    operands: Mapping[str, ir.Value],
    squares: str,
    ratio: str,
    apply: str,
    outputs: Sequence[ir.Value],
) -> list[Step]:
    """The update of a parameter with a rate of its own, which two sums of squares over all of it make."""
    made, factor = update.call.value("squares", ir.Shape([2])), update.call.value("ratio", ir.Shape([]))
    total = update.summed(made, range(len(update.shape)))
    return [
        update.call.node(squares, operands, [made], "squares"),
        total,
        update.call.node(ratio, {"squares": total.total}, [factor], "ratio"),
        update.call.node(apply, {**operands, "ratio": factor}, outputs, "update"),
    ]


WHOLE_UPDATES: Mapping[str, Callable[[WholeUpdate], list[Step]]] = {
    "lamb": lamb,
    "lars": lars,
    "adafactor": adafactor,
    "row_adagrad": row_adagrad,
}
"""Keys are the types in a plan."""


def without_terms(steps: Sequence[Step], wanted: Collection[ir.Value]) -> list[Step]:
    """The steps that make the wanted values where the sums are given."""
    needed, kept_steps = {*wanted}, list[Step]()
    for step in reversed(steps):
        if isinstance(step, ShardSum):
            if step.total in needed:
                kept_steps.append(step)
        elif not needed.isdisjoint(step.outputs):
            needed.update(value for value in step.inputs if value is not None)
            kept_steps.append(step)
    return kept_steps[::-1]


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
