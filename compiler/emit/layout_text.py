"""The texts of layouts: types with shapes on a rank, the shard of a tensor that ranks have, the shardings of nodes' inputs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Sharded, Typed
from partc.compiler.ir.sharded import GroupFacts, ShardedValue, facts_of
from partc.compiler.ir.value_info import Shape
from partc.compiler.layout.layout import Layout, shards_along


def value_text(program: Typed, value: ir.Value, shape: Shape | None) -> str:
    """A value's type in a given shape; where that is not known, with the dims that are numbers."""
    info = program.values[value]
    if not info.is_tensor:
        return f"<{info.type}>"
    if shape is not None:
        return f"<{info.type}, ({', '.join(map(str, shape))})>"
    if value.shape is None:
        return f"<{info.type}, ?>"
    dims = ", ".join([str(d) if isinstance(d, int) else "?" for d in value.shape.dims])
    return f"<{info.type}, ({dims})>"


@functools.lru_cache(maxsize=1024)
def _alike(layout: Layout, facts: GroupFacts, those: GroupFacts) -> bool:
    """Whether ranks of a group have the same shard."""
    row = shards_along(layout.mesh, tuple([axis for axes in layout.cuts for axis in axes]))
    return len({row[facts.places[rank]] for rank in those.group if rank in facts.places}) == 1


def part_of(program: Typed, copy: ShardedValue, ranks: Sequence[int]) -> str:
    """Which part of a tensor ranks have: `   Shard: [0:16, 32:64] of (64, 128)`; empty where it is all of it.

    Where they have each another one it is told how large these are: `   Shard: (16, 32) of (64, 128) by rank`.
    """
    shape = program.values[copy.value].shape if copy.value in program.values else None
    sizes = tuple([size for size in shape or () if isinstance(size, int)])
    if copy.layout.is_replicated or shape is None or len(sizes) != len(copy.layout.cuts):
        return ""
    together = _alike(copy.layout, facts_of(copy.group), facts_of(tuple(ranks)))
    return _shard_text(copy.layout, copy.places[ranks[0]], sizes, together)


@functools.lru_cache(maxsize=4096)
def _shard_text(layout: Layout, place: int, sizes: tuple[int, ...], together: bool) -> str:
    """Which part of a tensor of these sizes the rank at a place has; of ranks that do not have it `together` how large theirs are."""
    box = layout.box(place, sizes)
    if not together:
        return f"   Shard: ({', '.join([str(end - begin) for begin, end in box])}) of ({', '.join(map(str, sizes))}) by rank"
    return f"   Shard: [{', '.join([f'{begin}:{end}' for begin, end in box])}] of ({', '.join(map(str, sizes))})"


def strategies(program: Sharded, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """The sharding of a node's inputs, for each group, or for the groups of one rank: ` {in_strategy: ((2, 4), (4, 1))}`."""
    return (f" {{in_strategy: {choice.strategy()}}}" for choice in _choices(program, node, rank))


def _choices(program: Sharded, node: ir.Node, rank: int | None) -> Iterator[NodeSharding]:
    placed = program.placement.get(node)
    for group in placed.groups if placed else ():
        choice = program.choices.get(NodeOnGroup(node, group)) if rank is None or rank in group else None
        if choice is not None:
            yield choice


def cut_text(program: Sharded, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """Who decided each cut of a node, per group that cuts it: `m in 2 by plan.yaml:4, k in 4 by plan.yaml:4`.

    With `rank` of the groups that it is in.
    """
    for choice in _choices(program, node, rank):
        if cut := choice.cut:
            yield ", ".join(
                [f"{factor} in {shards} by {choice.why.get(factor, '?')}" for factor, shards in cut.items()]
            )
