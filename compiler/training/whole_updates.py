"""Updates that need sums over all of a parameter: norms, or the means of rows and columns of a matrix.

Of a cut parameter a shard has terms of such a sum, which other nodes add up over ranks; a `ShardSum` stands where they do:

    %w.squares = partc.optimizer::LambSquares(%w, %w.direction)
    ShardSum(%w.squares -> %w.squares.whole, dims 0 and 1)
    %w.ratio = partc.optimizer::LambRatio(%w.squares.whole)

Each function is told which dims other ranks have shards of (`cut`): a sum over others alone is whole where it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import onnx_ir as ir


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
