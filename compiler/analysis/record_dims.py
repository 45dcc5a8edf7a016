"""The positions of a batch's records along a dim, and their positions after a reshape.

A dim of size apart * size * rest holds all `size` records `apart` times, one behind the other, each with `rest` elements:

    (batch, heads*8)       records along dim 0: apart 1, rest 1
    (batch*heads, 8)       apart 1, rest heads
    (seq*batch, 8)         apart seq: the elements of a record are at every batch-th place

A reshape moves no element, so the records stand as far apart in memory as before: the product of the dims in front of them times
`apart` stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import sympy
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import is_integral, normal
from partc.compiler.dims.reading import read

ONE = sympy.Integer(1)
KEEPS_ORDER = ("Reshape", "Flatten")
"""Ops that merge and split dims without reordering the elements."""


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
