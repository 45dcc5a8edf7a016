"""Where a parameter is updated: as it lies, or each rank its share (ZeRO, stage 1).

Ranks along a mesh axis that hold the same shard of a parameter would all do the same update, and keep the same state of the optimizer.
With `optimizer: {shard: dp}` each of them gets the sum of its share of the gradient (a ReduceScatter), updates that with its share of
the state, and the shares are gathered (an AllGather).

    weight [512, 256], whole on dp=4     ->     gradient, momentum and update [128, 256] on each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from partc.compiler.ir.program import Targeted
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal, on_common_mesh

Over: TypeAlias = str | Literal[True] | None
"""The mesh axis whose ranks share the work; True: all ranks that hold the same."""


def shared_out(program: Targeted, home: ShardedValue, over: Over) -> ShardedValue:
    """The version of a parameter that each rank updates: sharded further along the first divisible dim, if there is one."""
    if not over:
        return home
    axes = program.plan.axes_of(home.group) or (("", len(home.group)),)
    places = tuple(place for place, (name, _) in enumerate(axes) if over is True or name == over)
    common = on_common_mesh(home.layout, Layout(tuple(size for _, size in axes), (places,))) if places else None
    shape = program.values[home.value].shape
    if common is None or shape is None:
        return home
    layout, marked = common
    used = {axis for cuts in layout.cuts for axis in cuts}
    free = tuple(axis for axis in marked.cuts[0] if axis not in used)
    shards = math.prod(layout.mesh[axis] for axis in free)
    dim = divided_dim(shape, [layout.num_shards(dim) for dim in range(len(shape))], shards)
    if dim is None:
        return home
    cuts = tuple(own + free if at == dim else own for at, own in enumerate(layout.cuts))
    return ShardedValue(home.value, home.group, normal(Layout(layout.mesh, cuts)))


def divided_dim(shape: Sequence[int | str], cut: Sequence[int], shards: int) -> int | None:
    """The first dim of a parameter, whose dims are cut into as many shards as `cut` says, that can be divided further into `shards`."""
    sizes = enumerate(zip(shape, cut, strict=True))
    fits = (dim for dim, (size, own) in sizes if isinstance(size, int) and size and size % (own * shards) == 0)
    return next(fits, None) if shards > 1 else None
