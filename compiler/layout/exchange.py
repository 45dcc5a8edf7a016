"""The messages that bring a value from one layout to another: which shard goes from which rank to which.

A rank needs a box of the value, and that box intersects the shards of other ranks: it receives each intersection once. Boxes are fractions
of the value's dims, so that one list of parts is valid for every size:

    rows cut in 2 over ranks 0-5 (2x3)  ->  in 3 (3x2)     rank 2, who needs rows 1/3..2/3:
    source 2, target 2, rows 1/3..1/2   local                source 5, target 2, rows 1/2..2/3   received

Where several ranks hold a shard: a target that holds it keeps its own, without a message. Within one group every other target receives it
from the holder that has the same coordinates on the axes that do not shard the value, so that replicas communicate only among themselves.
Between groups the targets are distributed over the holders in order, the same number to each.

Partial values are sent unreduced: the index of a rank's partial value is treated as one more dim, sharded into all partial values.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from partc.compiler.layout.layout import Layout

Span: TypeAlias = tuple[tuple[Fraction, Fraction], ...]
"""Per dim, the begin and end as fractions of its size."""
Numbers: TypeAlias = tuple[int, ...]
"""Per dim the index of the shard, and last the index of the partial value."""


@dataclass(frozen=True)
class ExchangeBox:
    """A box of the value that rank `target` gets from rank `source`; the two are equal where a rank keeps its own box."""

    source: int
    target: int
    span: Span


@dataclass(frozen=True)
class Routes:
    """The boxes that change a value from one layout on one group to another layout, perhaps on another group."""

    before: Layout
    after: Layout
    source_group: tuple[int, ...]
    target_group: tuple[int, ...]

    def __post_init__(self) -> None:
        for layout, group in ((self.before, self.source_group), (self.after, self.target_group)):
            if layout.size != len(group) or len(set(group)) != len(group):
                raise ValueError(f"mesh {layout.mesh} needs {layout.size} distinct ranks, not {group}")
        if len(self.before.cuts) != len(self.after.cuts):
            raise ValueError(f"{self.before} and {self.after} are of values with different ranks")
        if not can_travel(self.before, self.after):
            raise ValueError(f"the partial values of {self.before} are not those of {self.after}: reduce them first")

    def of_target(self, rank: int) -> tuple[ExchangeBox, ...]:
        """The boxes that `rank` assembles, by ascending position in the value: those it receives, and its own, if any."""
        index = self.target_group.index(rank)
        wanted = numbers(self.after, index)
        found = []
        for shard in _overlapping(wanted, self.after, self.before):
            source = _givers(self, shard)[index]
            found.append(ExchangeBox(self.source_group[source], rank, _common(shard, self.before, wanted, self.after)))
        return tuple(found)

    def parts(self) -> tuple[ExchangeBox, ...]:
        """All boxes, by target."""
        return tuple(part for rank in self.target_group for part in self.of_target(rank))

    def received(self) -> tuple[Fraction, ...]:
        """For each rank of the target group, the share of the global value that it receives from other ranks."""
        return _received(self)


def can_travel(before: Layout, after: Layout) -> bool:
    """Whether the change needs messages only, no computation: both layouts have the same partial values, or none."""
    return _num_partials(before) == _num_partials(after) and {r for _, r in before.partial} == {
        r for _, r in after.partial
    }


def numbers(layout: Layout, index: int) -> Numbers:
    """The index of the shard in each dim that the group's `index`-th rank holds, and the index of its partial value."""
    at = layout.coordinates(index)
    term = 0
    for axis, _ in layout.partial:
        term = term * layout.mesh[axis] + at[axis]
    return (*layout.shard(index), term)


def span_of(layout: Layout, index: int) -> Span:
    """The box of the value that the group's `index`-th rank holds."""
    return tuple(
        (Fraction(number, layout.num_shards(dim)), Fraction(number + 1, layout.num_shards(dim)))
        for dim, number in enumerate(layout.shard(index))
    )


def within(span: Span, shard: Span) -> Span:
    """Converts a box in fractions of the value to fractions of the shard that contains it; ValueError where the shard does not."""
    found = []
    for (begin, end), (first, last) in zip(span, shard, strict=True):
        if not first <= begin <= end <= last:
            raise ValueError(f"{begin}..{end} is not inside of {first}..{last}")
        found.append(((begin - first) / (last - first), (end - first) / (last - first)))
    return tuple(found)


def _num_partials(layout: Layout) -> int:
    return math.prod(layout.mesh[axis] for axis, _ in layout.partial)


def _counts(layout: Layout) -> Numbers:
    return (*layout.shards, _num_partials(layout))


@functools.lru_cache(maxsize=256)
def _holders(layout: Layout) -> Mapping[Numbers, tuple[int, ...]]:
    """Maps each shard to the ranks that hold it, as ascending indices."""
    found: dict[Numbers, list[int]] = {}
    for index in range(layout.size):
        found.setdefault(numbers(layout, index), []).append(index)
    return {shard: tuple(indices) for shard, indices in found.items()}


def _overlapping(shard: Numbers, layout: Layout, other: Layout) -> itertools.product[Numbers]:
    """The shards of the layout `other` that intersect a shard of `layout`."""
    return itertools.product(
        *(
            range(number * theirs // ours, -(-(number + 1) * theirs // ours))
            for number, ours, theirs in zip(shard, _counts(layout), _counts(other), strict=True)
        )
    )


@functools.lru_cache(maxsize=4096)
def _givers(routes: Routes, shard: Numbers) -> Mapping[int, int]:
    """Maps each receiver of (a part of) a shard of `before`, in ascending order, to the holder that sends it; both as indices."""
    before, after = routes.before, routes.after
    targets = sorted(
        index for wanted in _overlapping(shard, before, after) for index in _holders(after).get(wanted, ())
    )
    holders = _holders(before)[shard]
    if routes.source_group == routes.target_group:
        return {target: _neighbour(before, holders[0], target) for target in targets}
    own = {routes.source_group[holder]: holder for holder in holders}
    found = {target: own.get(routes.target_group[target]) for target in targets}
    without = [target for target, holder in found.items() if holder is None]
    dealt = {target: holders[place * len(holders) // len(without)] for place, target in enumerate(without)}
    return {target: dealt[target] if holder is None else holder for target, holder in found.items()}


def _neighbour(layout: Layout, holder: int, index: int) -> int:
    """The rank with the same shard as `holder` and the coordinates of `index` on all axes that do not shard the value."""
    fixed = {axis for axes in layout.cuts for axis in axes} | {axis for axis, _ in layout.partial}
    found = 0
    for axis, (there, here) in enumerate(zip(layout.coordinates(holder), layout.coordinates(index), strict=True)):
        found = found * layout.mesh[axis] + (there if axis in fixed else here)
    return found


@functools.lru_cache(maxsize=4096)
def _common(shard: Numbers, before: Layout, wanted: Numbers, after: Layout) -> Span:
    common = []
    for dim in range(len(before.cuts)):
        ours, theirs = before.num_shards(dim), after.num_shards(dim)
        begin = max(Fraction(shard[dim], ours), Fraction(wanted[dim], theirs))
        end = min(Fraction(shard[dim] + 1, ours), Fraction(wanted[dim] + 1, theirs))
        common.append((begin, end))
    return tuple(common)


@functools.lru_cache(maxsize=1024)
def _received(routes: Routes) -> tuple[Fraction, ...]:
    before, after = routes.before, routes.after
    places = {rank: index for index, rank in enumerate(routes.source_group)}
    ours, theirs = _counts(before), _counts(after)
    shares = []
    for index, rank in enumerate(routes.target_group):
        wanted = numbers(after, index)
        unit = math.prod(math.lcm(a, b) for a, b in zip(ours[:-1], theirs[:-1], strict=True))
        kept = 0
        if rank in places:
            shard = numbers(before, places[rank])
            kept = int(shard[-1] == wanted[-1])
            for number, our, other, their in zip(shard[:-1], ours, wanted[:-1], theirs, strict=False):
                scale = math.lcm(our, their)
                begin = max(number * (scale // our), other * (scale // their))
                end = min((number + 1) * (scale // our), (other + 1) * (scale // their))
                kept *= max(0, end - begin)
        shares.append(Fraction(1, math.prod(theirs[:-1])) - Fraction(kept, unit))
    return tuple(shares)
