"""Resharding, from one layout to another: the steps change which rank holds which shard, never the value.

Within a group both layouts are first written on a mesh that subdivides both. The axes that both use in the same way stay. Then the axes
that do not shard the target are removed, and those that do are added, as soon as the order of axes within the dims allows it, the cheapest
first: local slices, reduce_scatter, all_to_all, all_reduce along the remaining partial axes, all_gather, and zero padding and masking of
replicas where the target is partial (`greedy_path`).

    rows -> whole              all_gather              whole -> rows      slice
    rows -> columns            all_to_all              sum -> rows        reduce_scatter
    rows over (0, 1) -> over 0     all_gather over 1       sum -> whole       all_reduce

Partial values whose sum only one rank of each set needs are reduced to that rank (Reduce).

Two alternatives are compared with this one by the bytes that ranks receive: one exchange of the intersecting shards, in which no rank
receives bytes twice or without need (rows over 0 -> rows over 1; 2x3 -> 3x2; every change of group), and, before or after either, other
layouts to which partial values are reduced or from which they are padded. Of alternatives with equal bytes, per rank and in total, the one
without an exchange wins, unless it needs more collectives than to gather every dim, then the one with the fewest steps.

Finds the steps between two layouts on the same mesh, axis by axis: every step adds or removes some axes at the minor end of a dim.

The rules are listed in the order in which they are tried; after each step the first one is tried again. So steps that shrink a value
precede steps that move bytes, and steps that enlarge it are last. Where the order of axes within a dim allows no rule, the walk ends before
its target: `rows over (0, 1) -> over (1, 0)` has no step of this kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import takewhile
from typing import TypeAlias

from partc.compiler.layout.exchange import can_travel, span_of
from partc.compiler.layout.layout import Layout, Partial, Placement, Replicate, Shard
from partc.compiler.layout.mesh import normal, on_common_mesh
from partc.compiler.layout.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MaskReplicas,
    Move,
    Reduce,
    ReduceScatter,
    Slice,
    Transfer,
    ZeroPad,
    bytes_moved,
    is_local,
)

Moves = tuple[Move, ...]


@functools.lru_cache(maxsize=4096)
def lower(
    source: Layout,
    target: Layout,
    source_group: tuple[int, ...],
    target_group: tuple[int, ...],
    divisors: tuple[int, ...] = (),
) -> Moves:
    """Returns the steps from `source` on `source_group` to `target` on `target_group`; () where each rank already holds its shard.

    `divisors`: per dim a number that is known to divide its size; without it, the least that the shards of source and target need. No step
    shards a dim unless `divisors` prove that the shards are equal. The layout after the last step has the shards and partial values of
    `target` on the same ranks, perhaps written on another mesh. Raises ValueError for layouts with different numbers of dims, groups whose
    sizes are not those of their meshes, and a layout with two different pending reductions.
    """
    _check(source, target)
    for layout, group in ((source, source_group), (target, target_group)):
        if layout.size != len(group) or len(set(group)) != len(group):
            raise ValueError(f"mesh {layout.mesh} needs {layout.size} distinct ranks, not {group}")
    divisors = divisors or tuple(math.lcm(source.num_shards(d), target.num_shards(d)) for d in range(len(source.cuts)))
    source, target = normal(source), normal(target)
    if source_group == target_group:
        if source == target:
            return ()
        source, target = on_common_mesh(source, target) or (source, target)
    elif _has_all(source, target, source_group, target_group):
        return ()
    ways = _Ways(source_group, target_group, divisors)
    return ways.direct(source, target) or min(ways.all(source, target), key=lambda moves: _price(moves, source))


def lower_unknown(
    source: Layout, target: Layout, source_group: tuple[int, ...], target_group: tuple[int, ...]
) -> Moves:
    """Same as `lower` for a value whose shape is known only at run time: its ranks only reduce it, gather it and send all of it."""
    moves = lower(source, target, source_group, target_group)
    if all(isinstance(move, AllReduce | AllGather) or is_local(move) or _is_message(move) for move in moves):
        return moves
    whole, there = (Layout.replicated((len(group),), len(source.cuts)) for group in (source_group, target_group))
    return (
        *lower(source, whole, source_group, source_group),
        *lower(whole, there, source_group, target_group),
        *lower(there, target, target_group, target_group),
    )


def _is_message(move: Move) -> bool:
    """Whether a change of group sends each value as a whole: all boxes are the same and cover the full shard."""
    if not isinstance(move, Transfer):
        return False
    parts = move.routes.parts()
    spans = {part.span for part in parts}
    return len(spans) == 1 and all(begin == 0 and end == 1 for begin, end in next(iter(spans)))


@dataclass(frozen=True)
class _Ways:
    """The alternative sequences of steps that are compared: reduce, then move, then make partial again."""

    source_group: tuple[int, ...]
    target_group: tuple[int, ...]
    divisors: tuple[int, ...]

    def direct(self, source: Layout, target: Layout) -> Moves:
        """The greedy path, where no other can have fewer bytes: slices and at most one other step, the last; () elsewhere."""
        if self.source_group != self.target_group or source.mesh != target.mesh:
            return ()
        moves = greedy_path(source, target, self.source_group)
        arrived = bool(moves) and moves[-1].after == target
        return moves if arrived and all(isinstance(move, Slice) for move in moves[:-1]) else ()

    def all(self, source: Layout, target: Layout) -> Iterator[Moves]:
        for first, reduced in self._reductions(source, target):
            ways = replace(self, source_group=first[-1].group) if first else self
            for awaiting, last in ways._endings(reduced, target):
                for moves in ways._between(reduced, awaiting):
                    yield first + moves + last

    def _reductions(self, source: Layout, target: Layout) -> Iterator[tuple[Moves, Layout]]:
        """Candidate reductions: steps after which the value is partial only where the target is, with the layout then; first, no steps."""
        yield (), source
        if not source.partial:
            return
        starts: list[Moves] = [()]
        same = self.source_group == self.target_group and source.mesh == target.mesh
        if same:
            starts.append(greedy_path(source, target, self.source_group, SHRINKING))
        for start in dict.fromkeys(starts):
            at = start[-1].after if start else source
            terms = tuple(term[0] for term in at.partial if not (same and term in target.partial))
            if not terms:
                yield start, at
                continue
            reduced = all_reduce(at, self.source_group, terms)
            yield (*start, reduced), reduced.after
            for dim in range(len(at.cuts)):
                scattered = reduce_scatter(at, self.source_group, dim, terms)
                if self._proven(scattered.after, dim):
                    yield (*start, scattered), scattered.after
            if self.source_group != self.target_group:
                one, group, axes = self._one_copy(at, terms)
                to_one = reduce_to(one, group, axes, self._root(one, group, axes))
                yield (*start, to_one), to_one.after

    def _one_copy(self, at: Layout, terms: tuple[int, ...]) -> tuple[Layout, tuple[int, ...], tuple[int, ...]]:
        """The replica of a partial value that is on the target's ranks; the full layout where no single replica covers them.

        Returns the layout, the ranks and the partial axes of the replica. With mesh (dp, tp), partial along dp and rank 0 as the target, it
        is the ranks with tp = 0. The other replicas are not reduced, as they have no reader.
        """
        used = {axis for cuts in at.cuts for axis in cuts} | {axis for axis, _ in at.partial}
        kept = [axis for axis in range(len(at.mesh)) if axis in used]
        places = {rank: at.coordinates(index) for index, rank in enumerate(self.source_group)}
        repeated = [axis for axis in range(len(at.mesh)) if axis not in used]
        wanted = {
            tuple(places[rank][axis] for axis in repeated) if rank in places else () for rank in self.target_group
        }
        if not repeated or len(wanted) > 1 or wanted == {()}:
            return at, self.source_group, terms
        (here,) = wanted
        group = tuple(rank for rank, place in places.items() if tuple(place[axis] for axis in repeated) == here)
        new = {axis: number for number, axis in enumerate(kept)}
        layout = Layout(
            tuple(at.mesh[axis] for axis in kept),
            tuple(tuple(new[axis] for axis in cuts) for cuts in at.cuts),
            tuple((new[axis], reduce) for axis, reduce in at.partial),
        )
        return layout, group, tuple(new[axis] for axis in terms)

    def _root(self, at: Layout, group: tuple[int, ...], terms: tuple[int, ...]) -> int:
        """The position along the partial axes at which most ranks are in the target's group: the root of the Reduce."""
        wanted, sets = {*self.target_group}, at.groups(terms)
        here = [sum(group[indices[place]] in wanted for indices in sets) for place in range(len(sets[0]))]
        return here.index(max(here))

    def _endings(self, reduced: Layout, target: Layout) -> Iterator[tuple[Layout, Moves]]:
        """Candidate last layouts, each with the local steps that make it the partial target; first, the target itself without steps."""
        yield target, ()
        same = self.source_group == self.target_group and reduced.mesh == target.mesh
        terms = tuple(term[0] for term in target.partial if not (same and term in reduced.partial))
        if not terms:
            return
        reduce = dict(target.partial)[terms[0]]
        without = with_shards(target, {}, dict.fromkeys(terms, ""))
        yield without, (MaskReplicas(self.target_group, target, terms, reduce),)
        for dim in range(len(target.cuts)):
            cut = with_shards(without, {dim: without.cuts[dim] + terms})
            if reduce == "sum" and self._proven(cut, dim):
                yield cut, (ZeroPad(self.target_group, target, dim, terms),)

    def _between(self, source: Layout, target: Layout) -> Iterator[Moves]:
        """Candidate paths between two layouts: the greedy path, if it arrives, and one exchange, if no reduction is pending."""
        if self.source_group != self.target_group:
            if can_travel(source, target):
                yield (Transfer(self.target_group, target, source, self.source_group),)
            return
        source, target = normal(source), normal(target)
        if source == target:
            yield ()
            return
        if common := on_common_mesh(source, target):
            source, target = common
            moves = greedy_path(source, target, self.source_group)
            if moves and moves[-1].after == target:
                yield moves
        if can_travel(source, target):
            yield (Exchange(self.target_group, target, source),)

    def _proven(self, layout: Layout, dim: int) -> bool:
        return self.divisors[dim] % layout.num_shards(dim) == 0


def _check(source: Layout, target: Layout) -> None:
    if len(source.cuts) != len(target.cuts):
        raise ValueError(f"{source} and {target} are of values with different ranks")
    for layout in (source, target):
        reductions = sorted({reduce for _, reduce in layout.partial})
        if len(reductions) > 1:
            raise ValueError(f"{layout} awaits {' and '.join(reductions)}, and which comes first changes the value")


def _has_all(source: Layout, target: Layout, source_group: tuple[int, ...], target_group: tuple[int, ...]) -> bool:
    """Whether every rank of the target group already holds the shard that it needs."""
    if source.partial or target.partial or not set(target_group) <= set(source_group):
        return False
    places = {rank: index for index, rank in enumerate(source_group)}
    return all(span_of(source, places[rank]) == span_of(target, index) for index, rank in enumerate(target_group))


def _price(moves: Moves, source: Layout) -> tuple[Fraction | int, ...]:
    """The sort key of a sequence of steps, lower is better: bytes; then collectives in excess of those that reduce and gather every dim."""
    traffic = bytes_moved(moves)
    collectives = sum(not is_local(move) for move in moves)
    excess = max(0, collectives - bool(source.partial) - sum(map(bool, source.cuts)))
    general = sum(isinstance(move, Exchange) for move in moves)
    return traffic.most, traffic.total, excess, general, collectives, len(moves)


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
