"""No sequence of steps has fewer bytes than the one that is chosen: found by the shortest path over all layouts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
from layout_simulator import layouts
from partc.compiler.layout.exchange import can_travel
from partc.compiler.layout.layout import Layout, Replicate
from partc.compiler.layout.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MaskReplicas,
    Move,
    ReduceScatter,
    Slice,
    ZeroPad,
    bytes_moved,
    is_local,
)
from partc.compiler.layout.reshard import lower, with_shards

Cost = tuple[Fraction, Fraction]


def steps(at: Layout, every: list[Layout]) -> Iterator[Move]:
    """Every step that can be made from a layout, over any axes in any order."""
    group, dims, awaited = tuple(range(at.size)), range(len(at.cuts)), [axis for axis, _ in at.partial]
    for axes in choices([axis for axis in range(len(at.mesh)) if at.placement(axis) == Replicate()]):
        yield MaskReplicas(group, with_shards(at, {}, dict.fromkeys(axes, "sum")), axes, "sum")
        yield from (Slice(group, with_shards(at, {dim: at.cuts[dim] + axes}), dim, axes) for dim in dims)
    for axes in choices(awaited):
        done = with_shards(at, {}, dict.fromkeys(axes, ""))
        yield AllReduce(group, done, axes, "sum")
        for dim in dims:
            yield ReduceScatter(group, with_shards(done, {dim: at.cuts[dim] + axes}), dim, axes, "sum")
    for dim, count in itertools.product(dims, range(1, 1 + len(at.mesh))):
        if count > len(at.cuts[dim]):
            continue
        axes, cuts = at.cuts[dim][-count:], {dim: at.cuts[dim][:-count]}
        yield AllGather(group, with_shards(at, cuts), dim, axes)
        yield ZeroPad(group, with_shards(at, cuts, dict.fromkeys(axes, "sum")), dim, axes)
        for split in set(dims) - {dim}:
            yield AllToAll(group, with_shards(at, {**cuts, split: at.cuts[split] + axes}), split, dim, axes)
    yield from (Exchange(group, other, at) for other in every if other != at and can_travel(at, other))


def choices(axes: list[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.permutations(axes, count) for count in range(1, 1 + len(axes)))


def cost(moves: tuple[Move, ...]) -> Cost:
    each = [bytes_moved([move]) for move in moves]
    return sum((step.most for step in each), Fraction(0)), sum((step.total for step in each), Fraction(0))


def least(source: Layout, target: Layout, graph: dict[Layout, list[tuple[Cost, Layout]]], shards: list[int]) -> Cost:
    """Of all sequences that cut no dim into other shards than are known to be equal."""
    best: dict[Layout, Cost] = {source: (Fraction(0), Fraction(0))}
    queue = [(*best[source], 0, source)]
    numbers = itertools.count(1)
    while queue:
        most, total, _, at = heapq.heappop(queue)
        if at == target:
            return most, total
        for (more, more_total), after in graph[at] if (most, total) == best[at] else ():
            known = all(count % after.num_shards(dim) == 0 for dim, count in enumerate(shards))
            if known and (after not in best or (most + more, total + more_total) < best[after]):
                best[after] = most + more, total + more_total
                heapq.heappush(queue, (*best[after], next(numbers), after))
    raise AssertionError(f"nothing leads from {source} to {target}")


@pytest.mark.parametrize(("mesh", "rank"), [((3,), 2), ((2, 3), 1), ((2, 2), 2)], ids=str)
def test_no_sequence_of_steps_has_fewer_bytes(mesh: tuple[int, ...], rank: int) -> None:
    """Except where a reduce_scatter and a slice of the same dim do it: no second collective is made to save some bytes."""
    every = list(layouts(mesh, rank))
    group = tuple(range(math.prod(mesh)))
    graph = {at: [(cost((move,)), move.after) for move in steps(at, every)] for at in every}
    for source, target in itertools.product(every, every):
        moves = lower(source, target, group, group)
        shards = [math.lcm(source.num_shards(dim), target.num_shards(dim)) for dim in range(rank)]
        match moves:
            case (ReduceScatter(dim=first), Slice(dim=second)) if first == second:
                continue
        assert cost(moves) == least(source, target, graph, shards), (source, target, moves)


def test_of_equal_bytes_plain_collectives_are_taken_unless_they_are_more_than_gathering_takes() -> None:
    whole = Layout((2, 3), ((), ()))
    gathers = lower(Layout((2, 3), ((0,), (1,))), whole, tuple(range(6)), tuple(range(6)))
    assert [type(move) for move in gathers] == [AllGather, AllGather]
    (one,) = lower(Layout((2, 3), ((0, 1), ())), Layout((2, 3), ((), (1,))), tuple(range(6)), tuple(range(6)))
    assert isinstance(one, Exchange)


def test_terms_that_the_target_awaits_too_stay() -> None:
    """Over axis 0 nothing is reduced, while what axis 1 awaits is scattered."""
    source = Layout((2, 3), ((), ()), ((0, "sum"), (1, "sum")))
    (move,) = lower(source, Layout((2, 3), ((1,), ()), ((0, "sum"),)), tuple(range(6)), tuple(range(6)))
    assert isinstance(move, ReduceScatter)
    assert move.after.partial == ((0, "sum"),)
    source = Layout((2, 2, 2), ((1,),), ((0, "sum"), (2, "sum")))
    moves = lower(source, Layout((2, 2, 2), ((0, 1),), ((2, "sum"),)), tuple(range(8)), tuple(range(8)))
    assert [type(move) for move in moves] == [ReduceScatter, Exchange]
    assert all(len(move.after.partial) == 1 for move in moves)


def test_slices_come_before_an_exchange_of_terms() -> None:
    """What two axes swap is halved by a third one first."""
    source = Layout((2, 2, 2), ((1,), ()), ((0, "sum"),))
    target = Layout((2, 2, 2), ((0, 1), (2,)))
    moves = lower(source, target, tuple(range(8)), tuple(range(8)))
    assert [type(move) for move in moves] == [Slice, ReduceScatter, Exchange]
    assert [is_local(move) for move in moves] == [True, False, False]
