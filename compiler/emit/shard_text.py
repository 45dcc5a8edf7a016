"""The text of a rank's shard of a tensor in the dumps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from partc.compiler.ir.program import Program
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.layout.layout import Layout


@functools.lru_cache(maxsize=1024)
def _alike(layout: Layout, group: Group, ranks: Group) -> bool:
    """Whether ranks of a group have the same shard."""
    wanted = {*ranks}
    return len({layout.shard(index) for index, rank in enumerate(group) if rank in wanted}) == 1


def part_of(program: Program, copy: ShardedValue, ranks: Sequence[int]) -> str:
    """Which part of a tensor ranks have: `   Shard: [0:16, 32:64] of (64, 128)`; empty where it is all of it.

    Where they have each another one it is told how large these are: `   Shard: (16, 32) of (64, 128) by rank`.
    """
    shape = program.values[copy.value].shape if copy.value in program.values else None
    sizes = [size for size in shape or () if isinstance(size, int)]
    if copy.layout.is_replicated or shape is None or len(sizes) != len(copy.layout.cuts):
        return ""
    box = copy.layout.box(copy.group.index(ranks[0]), sizes)
    if not _alike(copy.layout, copy.group, tuple(ranks)):
        return (
            f"   Shard: ({', '.join(str(end - begin) for begin, end in box)}) of ({', '.join(map(str, sizes))}) by rank"
        )
    return f"   Shard: [{', '.join(f'{begin}:{end}' for begin, end in box)}] of ({', '.join(map(str, sizes))})"
