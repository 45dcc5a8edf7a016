"""Finds the steps between two layouts on the same mesh, axis by axis: every step adds or removes some axes at the minor end of a dim.

The rules are listed in the order in which they are tried; after each step the first one is tried again. So steps that shrink a value
precede steps that move bytes, and steps that enlarge it are last. Where the order of axes within a dim allows no rule, the walk ends before
its target: `rows over (0, 1) -> over (1, 0)` has no step of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

from partc.compiler.layout.layout import Layout, Partial, Placement, Replicate, Shard
from partc.compiler.layout.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    MaskReplicas,
    Move,
    Reduce,
    ReduceScatter,
    Slice,
    ZeroPad,
)


@dataclass(frozen=True)
class WalkState:
    """A layout on the path to another one on the same mesh."""

    at: Layout
    target: Layout
    group: tuple[int, ...]

    @property
    def dims(self) -> range:
        return range(len(self.at.cuts))

    def missing(self, dim: int) -> tuple[int, ...]:
        """The axes that are still to be added to a dim; () while a minor axis must be removed from it first."""
        now, then = self.at.cuts[dim], self.target.cuts[dim]
        return then[len(now) :] if then[: len(now)] == now else ()

    def leaving(self, dim: int) -> tuple[int, ...]:
        """The axes that must be removed from a dim, for good or to return at another position."""
        now, then = self.at.cuts[dim], self.target.cuts[dim]
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, then, strict=False)))
        return now[common:]

    def awaited(self, axes: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
        """Lists, for each reduction, those of `axes` that are Partial by it now and must not stay so."""
        found: dict[str, list[int]] = {}
        for axis in axes:
            now = self.at.placement(axis)
            if isinstance(now, Partial) and now != self.target.placement(axis):
                found.setdefault(now.reduce, []).append(axis)
        return [(tuple(pending), reduce) for reduce, pending in found.items()]

    def may_await(self, reduce: str) -> bool:
        """Whether the value may become partial by a reduction now: while it is partial by another one, their order would matter."""
        return all(waiting == reduce for _, waiting in self.at.partial)


Rule: TypeAlias = Callable[[WalkState], Move | None]


def greedy_path(source: Layout, target: Layout, group: tuple[int, ...], rules: Sequence[Rule] = ()) -> tuple[Move, ...]:
    """Returns the steps that the rules allow from `source` towards `target`, both on one mesh. The path has arrived if the layout of the
    last step is the target."""
    moves: list[Move] = []
    place = WalkState(source, target, group)
    while step := next((move for rule in rules or RULES if (move := rule(place)) is not None), None):
        moves.append(step)
        place = replace(place, at=step.after)
    return tuple(moves)


def slice_free(place: WalkState) -> Move | None:
    for dim in place.dims:
        if axes := _run(place, place.missing(dim), lambda now: now == Replicate()):
            return Slice(place.group, with_shards(place.at, {dim: place.at.cuts[dim] + axes}), dim, axes)
    return None


def scatter(place: WalkState) -> Move | None:
    for dim in place.dims:
        if axes := _run(place, place.missing(dim), lambda now: isinstance(now, Partial)):
            return reduce_scatter(place.at, place.group, dim, axes)
    return None


def all_to_all(place: WalkState) -> Move | None:
    for split in place.dims:
        wanted = place.missing(split)
        for concat in place.dims:
            now = place.at.cuts[concat]
            count = next((n for n in range(len(wanted), 0, -1) if n <= len(now) and now[-n:] == wanted[:n]), 0)
            if count and concat != split:
                cuts = {split: place.at.cuts[split] + wanted[:count], concat: now[:-count]}
                return AllToAll(place.group, with_shards(place.at, cuts), split, concat, wanted[:count])
    return None


def reduce_rest(place: WalkState) -> Move | None:
    """AllReduce over the partial axes that no reduce_scatter handles."""
    axes = [axis for axis, _ in place.at.partial if not isinstance(place.target.placement(axis), Shard)]
    return next((all_reduce(place.at, place.group, axes) for axes, _ in place.awaited(axes)), None)


def gather(place: WalkState) -> Move | None:
    for dim in place.dims:
        if axes := _suffix(place, dim, lambda then: not isinstance(then, Shard) and then != Partial("sum")):
            return AllGather(place.group, with_shards(place.at, {dim: place.at.cuts[dim][: -len(axes)]}), dim, axes)
    return None


def pad(place: WalkState) -> Move | None:
    for dim in place.dims if place.may_await("sum") else ():
        if axes := _suffix(place, dim, lambda then: then == Partial("sum")):
            after = with_shards(place.at, {dim: place.at.cuts[dim][: -len(axes)]}, dict.fromkeys(axes, "sum"))
            return ZeroPad(place.group, after, dim, axes)
    return None


def keep(place: WalkState) -> Move | None:
    axes = {axis: reduce for axis, reduce in place.target.partial if place.at.placement(axis) == Replicate()}
    reduce = next(iter(axes.values()), "")
    return (
        MaskReplicas(place.group, with_shards(place.at, {}, axes), tuple(axes), reduce)
        if axes and place.may_await(reduce)
        else None
    )


SHRINKING: tuple[Rule, ...] = (slice_free, scatter)
RULES: tuple[Rule, ...] = (*SHRINKING, all_to_all, reduce_rest, gather, pad, keep)


def all_reduce(at: Layout, group: tuple[int, ...], axes: tuple[int, ...]) -> AllReduce:
    """The AllReduce over `axes`, which have one pending kind of reduction."""
    return AllReduce(group, with_shards(at, {}, dict.fromkeys(axes, "")), axes, _reduction(at, axes))


def reduce_scatter(at: Layout, group: tuple[int, ...], dim: int, axes: tuple[int, ...]) -> ReduceScatter:
    """The ReduceScatter over `axes`, which have one pending kind of reduction; `dim` is sharded over them afterwards."""
    after = with_shards(at, {dim: at.cuts[dim] + axes}, dict.fromkeys(axes, ""))
    return ReduceScatter(group, after, dim, axes, _reduction(at, axes))


def reduce_to(at: Layout, group: tuple[int, ...], axes: tuple[int, ...], root: int) -> Reduce:
    """The Reduce over `axes`, which have one pending kind of reduction, to the ranks whose position along them is `root`."""
    kept = [axis for axis in range(len(at.mesh)) if axis not in axes]
    new = {axis: number for number, axis in enumerate(kept)}
    after = Layout(
        tuple(at.mesh[axis] for axis in kept),
        tuple(tuple(new[axis] for axis in cuts) for cuts in at.cuts),
        tuple((new[axis], reduce) for axis, reduce in at.partial if axis in new),
    )
    roots = tuple(group[indices[root]] for indices in at.groups(axes))
    return Reduce(roots, after, at, group, axes, _reduction(at, axes), root)


def with_shards(
    layout: Layout, cuts: Mapping[int, tuple[int, ...]], partial: Mapping[int, str] | None = None
) -> Layout:
    """The layout with other axes for the dims of `cuts`, and with other reductions over the axes of `partial` ("" for none)."""
    terms = {**dict(layout.partial), **(partial or {})}
    return Layout(
        layout.mesh,
        tuple(cuts.get(dim, axes) for dim, axes in enumerate(layout.cuts)),
        tuple((axis, reduce) for axis, reduce in sorted(terms.items()) if reduce),
    )


def _reduction(layout: Layout, axes: Sequence[int]) -> str:
    return dict(layout.partial)[axes[0]]


def _run(place: WalkState, axes: tuple[int, ...], holds: Callable[[Placement], bool]) -> tuple[int, ...]:
    """The longest prefix of `axes` whose current placements satisfy `holds`."""
    return tuple(takewhile(lambda axis: holds(place.at.placement(axis)), axes))


def _suffix(place: WalkState, dim: int, holds: Callable[[Placement], bool]) -> tuple[int, ...]:
    """The minor axes of a dim that are to be removed from it and whose target placements satisfy `holds`."""
    last: Iterator[int] = takewhile(lambda axis: holds(place.target.placement(axis)), reversed(place.leaving(dim)))
    return tuple(reversed(tuple(last)))
