"""Writes a layout on other meshes: a mesh axis may be subdivided, and neighbouring axes that are used in the same way may be joined.

Ranks are row-major, so an axis of 6 is the two axes 2 and 3 (or 3 and 2), the first one major; both together replace it, in this order.
`normal` joins all that can be joined: layouts with equal normal forms put the same shards on the same ranks. `on_common_mesh` finds the
coarsest subdivision that two meshes have in common:

    mesh (8,)    rows sharded over 0      ->  mesh (2, 4)  rows sharded over (0, 1)
    mesh (2, 4)  rows sharded over 0      ->  mesh (2, 4)  rows sharded over 0
    mesh (2, 3) and mesh (3, 2)             have none
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from partc.compiler.layout.layout import Layout, Mesh


@functools.lru_cache(maxsize=4096)
def normal(layout: Layout) -> Layout:
    """The same layout on the mesh with the fewest axes: neighbours that are used in the same way are joined, axes of size 1 are dropped."""
    layout = _subdivided(layout, [(size,) if size > 1 else () for size in layout.mesh])
    joined: list[list[int]] = []
    for axis in range(len(layout.mesh)):
        if joined and _alike(layout, axis - 1, axis):
            joined[-1].append(axis)
        else:
            joined.append([axis])
    new = {axes[0]: number for number, axes in enumerate(joined)}
    return Layout(
        tuple(math.prod(layout.mesh[axis] for axis in axes) for axes in joined),
        tuple(tuple(new[axis] for axis in axes if axis in new) for axes in layout.cuts),
        tuple((new[axis], reduce) for axis, reduce in layout.partial if axis in new),
    )


@functools.lru_cache(maxsize=4096)
def on_common_mesh(first: Layout, other: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts on the coarsest mesh that subdivides the axes of both; None if there is none; axes of size 1 are dropped."""
    if first.size != other.size:
        raise ValueError(f"layouts of {first.size} and {other.size} ranks have no mesh in common")
    bounds = sorted({*_bounds(first.mesh), *_bounds(other.mesh)})
    if any(larger % smaller for smaller, larger in itertools.pairwise(bounds)):
        return None
    return _split_at(first, bounds), _split_at(other, bounds)


def _alike(layout: Layout, axis: int, following: int) -> bool:
    """Whether two neighbouring axes are used in the same way, so that one axis of the product of their sizes can replace them."""
    if layout.placement(axis) != layout.placement(following):
        return False
    for axes in layout.cuts:
        if axis in axes:
            return axes.index(following) == axes.index(axis) + 1
    return True


def _bounds(mesh: Mesh) -> list[int]:
    """The numbers of ranks that the first 0, 1, 2, ... axes span."""
    found = [1]
    for size in mesh:
        found.append(found[-1] * size)
    return found


def _split_at(layout: Layout, bounds: Sequence[int]) -> Layout:
    factors = []
    own = _bounds(layout.mesh)
    for begin, end in itertools.pairwise(own):
        inside = [bound for bound in bounds if begin <= bound <= end]
        factors.append(tuple(larger // smaller for smaller, larger in itertools.pairwise(inside)))
    return _subdivided(layout, factors)


def _subdivided(layout: Layout, factors: Sequence[tuple[int, ...]]) -> Layout:
    """The layout with every axis replaced, in place, by axes of the sizes that `factors` lists for it."""
    mesh: list[int] = []
    new: list[tuple[int, ...]] = []
    for sizes in factors:
        new.append(tuple(range(len(mesh), len(mesh) + len(sizes))))
        mesh.extend(sizes)
    return Layout(
        tuple(mesh),
        tuple(tuple(part for axis in axes for part in new[axis]) for axes in layout.cuts),
        tuple((part, reduce) for axis, reduce in layout.partial for part in new[axis]),
    )
