"""The layouts in which a node on a group reads its operands and makes its outputs: those of its sharding, else replicated.

MatMul on 0-7, mesh (2, 4), {m: (0,), k: (1,)}:   input 0 on 0-7 [2, 4], output 0 on 0-7 [2, 1] to be summed over 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import onnx_ir as ir
from partc.compiler.analysis.lost import dim_of
from partc.compiler.dims.expression import facts_of
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import SERVED
from partc.compiler.ir.program import Sharded
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal, on_common_mesh

Over: TypeAlias = str | Literal[True] | None
"""The mesh axis whose ranks share the work; True: all ranks that have the same value."""


def replicated_on(value: ir.Value, group: Group) -> ShardedValue:
    """Returns the version of a value that is replicated on a group."""
    rank = value.shape.rank() if value.shape is not None else 0
    return ShardedValue(value, group, normal(Layout.replicated((len(group),), rank)))


def laid_out(value: ir.Value, group: Group, layout: Layout | None) -> ShardedValue:
    """Returns the version of a value in a layout; the replicated one if there is no layout, or the value has an unknown number of dims."""
    if layout is None or (value.shape is None and layout.is_replicated):
        return replicated_on(value, group)
    return ShardedValue(value, group, normal(layout))


def input_layout_of(program: Sharded, instance: NodeOnGroup, k: int) -> ShardedValue:
    """Returns the version of operand `k` that a node on a group reads."""
    value = instance.node.inputs[k]
    assert value is not None
    if k == 0 and SERVED in instance.node.meta:  # a table, of which each server has an equal run of rows
        servers = instance.node.meta[SERVED]
        dims = len(value.shape or ())
        return laid_out(value, servers, Layout((len(servers),), ((0,), *[()] * (dims - 1))))
    choice = program.choices.get(instance)
    layout = choice.input(k) if choice else None
    return laid_out(value, instance.group, layout)


def output_layout_of(program: Sharded, instance: NodeOnGroup, k: int) -> ShardedValue:
    """Returns the version of output `k` that a node on a group makes."""
    value = instance.node.outputs[k]
    choice = program.choices.get(instance)
    layout = choice.output(k) if choice else None
    return laid_out(value, instance.group, layout)


def proven_divisors(program: Sharded, value: ir.Value) -> tuple[int, ...]:
    """Returns for each dim a number that is known to divide its size."""
    return divisors(program, [dim_of(program, value, dim) for dim in range(len(value.shape or ()))])


def divisors(program: Sharded, sizes: Sequence[int | str | None]) -> tuple[int, ...]:
    """Returns for each size, a number or an expression over the symbols, a number that is known to divide it; 1 for an unknown size."""
    known = {name: info.facts for name, info in program.symbols.items()}
    return tuple(
        dim if isinstance(dim, int) else 1 if dim is None else facts_of(dim, known).real_divisor() for dim in sizes
    )


def is_derived(program: Sharded, instance: NodeOnGroup) -> bool:
    """Whether a node's sharding is derived: neither the plan nor the model gives any of it."""
    choice = program.choices.get(instance)
    paths = program.derived_paths
    return choice is not None and choice.open and all(why in paths for why in choice.why.values())


def shared_out(program: Sharded, version: ShardedValue, over: Over) -> ShardedValue:
    """Returns the version of a parameter that each rank stores, or updates: sharded further along the first divisible dim, if any."""
    if not over:
        return version
    axes = program.plan.axes_of(version.group) or (("", len(version.group)),)
    places = tuple(place for place, (name, _) in enumerate(axes) if over is True or name == over)
    common = on_common_mesh(version.layout, Layout(tuple(size for _, size in axes), (places,))) if places else None
    shape = program.values[version.value].shape
    if common is None or shape is None:
        return version
    layout, marked = common
    used = {axis for cuts in layout.cuts for axis in cuts}
    free = tuple(axis for axis in marked.cuts[0] if axis not in used)
    shards = math.prod(layout.mesh[axis] for axis in free)
    dim = shared_dim(program, version, shards)
    if dim is None:
        return version
    cuts = tuple(own + free if at == dim else own for at, own in enumerate(layout.cuts))
    return ShardedValue(version.value, version.group, normal(Layout(layout.mesh, cuts)))


def shared_dim(program: Sharded, version: ShardedValue, shards: int) -> int | None:
    """Returns the dim along which ranks share the update of a parameter; with `parts` in the plan the same for any number of ranks."""
    rules, shape = program.plan.pipeline, program.values[version.value].shape
    assert shape is not None
    least = rules.shares if rules is not None and rules.parts else shards
    return divided_dim(shape, [version.layout.num_shards(dim) for dim in range(len(shape))], least)


def divided_dim(shape: Sequence[int | str], cut: Sequence[int], shards: int) -> int | None:
    """Returns the first dim of a parameter that can be divided further into `shards`; `cut`: the current number of shards of each dim."""
    sizes = enumerate(zip(shape, cut, strict=True))
    fits = (dim for dim, (size, own) in sizes if isinstance(size, int) and size and size % (own * shards) == 0)
    return next(fits, None) if shards > 1 else None
