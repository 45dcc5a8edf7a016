"""Finds the batch dim of each input; an input without one has one value for all records.

1. What the plan says of an input under `batch_dims` holds.
2. The batch is the dim that the plan says of the first such input. Else it is the first dim of the labels, for data has a record at each
   place of it; without labels the first dynamic dim of the first input that has dims, or its first dim where all are fixed.
3. An input holds records along the dim that has the batch's name; of a fixed batch, along its first dim where that has its size.
4. Exporters name the batch of each input by itself: an input holds records along its first dim, too, if this has a name that no input has
   at a later place, as it has the length of a sequence.

    x (16, batch, 8)                      dim 1
    x (seq, batch, 8), labels (batch,)    dim 1 and dim 0
    x (batch, 8), y (3, batch), t (1,)    dim 0, dim 1 and none

Both training and streaming programs use this module.

The positions of a batch's records along a dim, and their positions after a reshape.

A dim of size apart * size * rest holds all `size` records `apart` times, one behind the other, each with `rest` elements:

    (batch, heads*8)       records along dim 0: apart 1, rest 1
    (batch*heads, 8)       apart 1, rest heads
    (seq*batch, 8)         apart seq: the elements of a record are at every batch-th place

A reshape moves no element, so the records stand as far apart in memory as before: the product of the dims in front of them times
`apart` stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import onnx_ir as ir
import sympy
from partc.compiler.analysis.bindings import unknown_input
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import is_integral, normal
from partc.compiler.dims.reading import read
from partc.compiler.errors import Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.plan.rules import BatchDim, Plan

OF_PIECES = "partc.of_pieces"
"""Key of `ir.Node.meta`: marks the Reshape that gives each microbatch a row with its records."""
BatchDims: TypeAlias = Mapping[ir.Value, int]
"""Maps each input with records to the dim of the records."""


def batch_dims(graph: ir.Graph, labels: str = "", said: Mapping[str, BatchDim] | None = None) -> dict[ir.Value, int]:
    """Maps each input that holds records to their dim: dim 0 for an input of unknown shape."""
    said = said or {}
    dims = {value: tuple(value.shape.dims) for value in graph.inputs if value.shape is not None and len(value.shape)}
    batch = _batch(dims, labels, said)
    later = {_name(dim) for some in dims.values() for dim in some[1:]}
    places: dict[ir.Value, int] = {}
    for value in graph.inputs:
        own = said.get(name_of(value))
        at = own.dim if own is not None else 0 if value.shape is None else _along(dims.get(value, ()), batch, later)
        if at is not None and (value.shape is None or at < len(value.shape)):
            places[value] = at
    return places


def batch_symbols(dims: BatchDims) -> set[str]:
    """The names of the dims along which inputs hold records."""
    along = (value.shape[dim] for value, dim in dims.items() if value.shape is not None)
    return {str(dim.value) for dim in along if isinstance(dim, ir.SymbolicDim)}


def contradictions(graph: ir.Graph, dims: BatchDims, count: int, where: str) -> Iterator[Problem]:
    """Problems that keep a batch from being divided into `count` microbatches: inputs that have the batch dim at a second place."""
    symbols = batch_symbols(dims)
    for value in graph.inputs:
        others = [k for k, dim in enumerate(value.shape or ()) if _name(dim) in symbols and dims.get(value) != k]
        if not others or value.shape is None:
            continue
        name = _name(value.shape[others[0]])
        told = f"dim {others[0]} of input '{value.name}' is '{name}', the records of a batch, and it holds "
        told += f"records along dim {dims[value]}" if value in dims else "none"
        law = f"a batch is cut into {count} parts along one dim of each input that has it"
        yield Problem(
            where, told, law, f"export the model with another name for that dim than '{name}', or do not cut the batch"
        )


def wrong_batch_dims(graph: ir.Graph, plan: Plan) -> Iterator[Problem]:
    """Problems of the plan's `batch_dims`: inputs that do not exist, and dims that an input does not have."""
    inputs = {name_of(value): value for value in graph.inputs}
    for name, batch_dim in plan.dims.batch_dims.items():
        if name not in inputs:
            yield unknown_input(name, batch_dim.where, graph, plan)
            continue
        shape = inputs[name].shape
        if batch_dim.dim is not None and shape is not None and batch_dim.dim >= len(shape):
            fact = f"input '{name}' has {len(shape)} dims, and holds records along dim {batch_dim.dim}"
            yield Problem(
                batch_dim.where,
                fact,
                "dims are counted from 0",
                "name one that it has, or null where it holds no records",
            )


def _batch(
    dims: Mapping[ir.Value, tuple[int | ir.SymbolicDim, ...]], labels: str, said: Mapping[str, BatchDim]
) -> int | ir.SymbolicDim | None:
    for value, some in dims.items():
        own = said.get(name_of(value))
        if own is not None and own.dim is not None and own.dim < len(some):
            return some[own.dim]
    given = [value for value in dims if value.name not in said]
    if (own_labels := next((value for value in given if value.name == labels), None)) is not None:
        return dims[own_labels][0]
    first = next((dims[value] for value in given), None)
    return None if first is None else next((dim for dim in first if isinstance(dim, ir.SymbolicDim)), first[0])


def _along(dims: tuple[int | ir.SymbolicDim, ...], batch: int | ir.SymbolicDim | None, later: set[str]) -> int | None:
    """The dim along which an input holds records; None where it holds none."""
    if not dims or batch is None:
        return None
    if isinstance(batch, int):
        return 0 if dims[0] == batch else None
    same = (k for k, dim in enumerate(dims) if isinstance(dim, ir.SymbolicDim) and dim.value == batch.value)
    own = isinstance(dims[0], ir.SymbolicDim) and _name(dims[0]) not in later
    return next(same, 0 if own else None)


def _name(dim: int | ir.SymbolicDim) -> str:
    return "" if isinstance(dim, int) else str(dim.value)


ONE = sympy.Integer(1)
KEEPS_ORDER = ("Flatten", "JoinTokens", "Reshape", "SplitTokens")
"""Ops that merge and split dims without reordering the elements of a record."""


@dataclass(frozen=True)
class Shard:
    """A value that holds the `size` records of a batch along `dim`, all of them `stride` times in sequence.

    `size` is None where the dims of the records are not known, and `stride` None where records are alike, so that it may be any number.
    """

    dim: int
    size: sympy.Expr | None = None
    stride: sympy.Expr | None = ONE


def reshaped(
    shard: Shard, source: ir.Value | None, target: ir.Value | None, known: Mapping[str, Facts]
) -> Shard | None:
    """Returns the position of `source`'s records in `target`, which has the same elements in the same order; None where no dim has them."""
    here, there = dims_of(source), dims_of(target)
    if here is None or there is None or shard.size is None or shard.stride is None:
        return None
    before, ahead = sympy.prod(here[: shard.dim]) * shard.stride, ONE
    for k, dim in enumerate(there):
        if ahead == 0:
            return None
        apart = normal(before / ahead, known)
        if _is_count(apart, known) and _is_count(normal(dim / (apart * shard.size), known), known):
            return replace(shard, dim=k, stride=apart)
        ahead *= dim
    return None


def together(shards: Iterable[Shard]) -> Shard | None:
    """Returns the common position of records in operands read by one factor; None where the positions differ."""
    found = [*shards]
    told = [one for one in found if one.stride is not None] or found[:1]
    return told[0] if told and all(one.stride == told[0].stride for one in told) else None


def dims_of(value: ir.Value | None) -> Sequence[sympy.Expr] | None:
    """The dims of a value as expressions; None where one of them is not known."""
    if value is None or value.shape is None:
        return None
    found = [
        read(str(dim.value)) if isinstance(dim, ir.SymbolicDim) else sympy.Integer(dim) for dim in value.shape.dims
    ]
    return None if None in found else found


def dim_of(value: ir.Value | None, dim: int) -> sympy.Expr | None:
    """One dim of a value as an expression; None where it is not known."""
    dims = dims_of(value)
    return None if dims is None or dim >= len(dims) else dims[dim]


def _is_count(expression: sympy.Expr, known: Mapping[str, Facts]) -> bool:
    return expression != 0 and is_integral(sympy.expand(expression), known)
