"""Changes of layout: every pair of layouts keeps the value, known cases are the known collectives, and no way costs too much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_simulator import after, assert_held, layouts, offsets, scatter
from partc.compiler.layout.exchange import Routes, span_of, within
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal, on_common_mesh
from partc.compiler.layout.moves import AllGather, AllToAll, Exchange, Slice, Traffic, bytes_moved, is_local, share_of
from partc.compiler.layout.reshard import Moves, lower
from rows import of_today

FACTORS = (3, 1, 2)


def ranks(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def names(moves: Moves) -> list[str]:
    return [type(move).__name__ for move in moves]


def within_group(source: Layout, target: Layout) -> Moves:
    return lower(source, target, ranks(source.size), ranks(target.size))


def naive(source: Layout, target: Layout, source_group: tuple[int, ...], target_group: tuple[int, ...]) -> Traffic:
    """To reduce all terms, gather all dims, and send the whole to every rank that is not in the first group."""
    terms = math.prod(source.mesh[axis] for axis, _ in source.partial)
    local = Fraction(1, math.prod(source.num_shards(dim) for dim in range(len(source.cuts))))
    share = 2 * local * (1 - Fraction(1, terms)) + 1 - local
    new = sum(rank not in source_group for rank in target_group)
    overlap = any(rank in source_group for rank in target_group)
    most = share + 1 if new and overlap else max(share, Fraction(bool(new)))
    return Traffic(most, share * len(source_group) + new)


def check(
    source: Layout,
    target: Layout,
    source_group: tuple[int, ...],
    target_group: tuple[int, ...],
) -> Moves:
    """The value is kept, no dim is cut that source and target leave whole, and the naive way is nowhere better."""
    shards = [math.lcm(source.num_shards(dim), target.num_shards(dim)) for dim in range(len(source.cuts))]
    shape = tuple(count * FACTORS[dim] for dim, count in enumerate(shards))
    value = np.arange(1, 1 + math.prod(shape)).reshape(shape)
    held = scatter(value, source, source_group, np.random.default_rng(math.prod(shape)))
    moves = lower(source, target, source_group, target_group)
    for move in moves:
        held = after(move, held, shape)
        assert_held(held, value, move.after, move.group)
        assert all(shards[dim] % count == 0 for dim, count in enumerate(move.after.shards))
    if not moves or (moves[-1].after, moves[-1].group) != (target, target_group):
        assert_held(held, value, target, target_group)

    traffic, limit = bytes_moved(moves), naive(source, target, source_group, target_group)
    assert traffic.total <= limit.total, moves
    if source_group == target_group:
        assert traffic.most <= limit.most, moves
    collectives = [move for move in moves if not is_local(move)]
    limit_of_collectives = bool(source.partial) + sum(map(bool, source.cuts)) + (source_group != target_group)
    assert len(collectives) <= limit_of_collectives or traffic.total < limit.total, moves
    if not target.partial and any(isinstance(move, AllGather) for move in moves):
        assert not any(isinstance(move, Slice) for move in moves[[*map(type, moves)].index(AllGather) :]), moves
    return moves


def check_pairs(sources: Iterable[Layout], targets: Iterable[Layout]) -> None:
    """Checks all of few pairs of layouts; of many a quarter, another one each day."""
    pairs = [*itertools.product(sources, targets)]
    group = ranks(pairs[0][0].size)
    for source, target in of_today(pairs, max(len(pairs) // 4, min(len(pairs), 100))):
        check(source, target, group, group)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_every_pair_of_layouts(mesh: tuple[int, ...], rank: int) -> None:
    check_pairs(layouts(mesh, rank), layouts(mesh, rank))


@pytest.mark.parametrize(
    ("one", "other", "rank"),
    [
        ((4,), (2, 2), 2),
        ((2, 3), (6,), 2),
        ((2, 3), (3, 2), 2),
        ((3, 2), (2, 3), 1),
        ((2, 2), (4,), 1),
        ((2, 2, 3), (2, 3, 2), 1),
        ((2, 1, 3), (1, 6), 2),
    ],
    ids=str,
)
def test_every_pair_of_layouts_on_other_meshes(one: tuple[int, ...], other: tuple[int, ...], rank: int) -> None:
    check_pairs(layouts(one, rank), layouts(other, rank))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_every_pair_of_layouts_with_other_reductions(reduce: str) -> None:
    check_pairs(layouts((2, 3), 2, reduce), layouts((2, 3), 2, reduce))
    check_pairs(layouts((2, 2), 1, reduce), layouts((2, 2), 1, "sum"))


@st.composite
def a_layout(draw: st.DrawFn, rank: int, meshes: tuple[tuple[int, ...], ...]) -> Layout:
    mesh = draw(st.sampled_from(meshes))
    order = draw(st.permutations(range(len(mesh))))
    places = {axis: draw(st.sampled_from((None, "P", *range(rank)))) for axis in order}
    cuts = tuple(tuple(axis for axis, place in places.items() if place == dim) for dim in range(rank))
    return Layout(mesh, cuts, tuple((axis, "sum") for axis in sorted(places) if places[axis] == "P"))


@given(st.data(), st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_three_axes(data: st.DataObject, rank: int) -> None:
    meshes = ((2, 2, 2), (4, 2), (2, 4), (8,))
    check(data.draw(a_layout(rank, meshes)), data.draw(a_layout(rank, meshes)), ranks(8), ranks(8))


@given(st.data(), st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_between_groups(data: st.DataObject, rank: int) -> None:
    meshes = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2))
    source, target = data.draw(a_layout(rank, meshes)), data.draw(a_layout(rank, meshes))
    groups = [tuple(data.draw(st.permutations(range(9)))[: layout.size]) for layout in (source, target)]
    check(source, target, *groups)


def test_known_changes_are_the_known_collectives() -> None:
    """Of a value with rows and columns on 4 ranks: what a rank receives, in fractions of the value."""
    whole, rows, columns = Layout((4,), ((), ())), Layout((4,), ((0,), ())), Layout((4,), ((), (0,)))
    terms = Layout((4,), ((), ()), ((0, "sum"),))
    known = {
        (whole, rows): (["Slice"], 0),
        (rows, columns): (["AllToAll"], Fraction(3, 16)),
        (rows, whole): (["AllGather"], Fraction(3, 4)),
        (terms, whole): (["AllReduce"], Fraction(3, 2)),
        (terms, columns): (["ReduceScatter"], Fraction(3, 4)),
        (whole, terms): (["MaskReplicas"], 0),
        (rows, terms): (["ZeroPad"], 0),
        (terms, terms): ([], 0),
    }
    for (source, target), (steps, share) in known.items():
        moves = within_group(source, target)
        assert (names(moves), bytes_moved(moves)) == (steps, Traffic(Fraction(share), 4 * Fraction(share)))


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        # rows in 8 as the data comes -> MatMul ((2, 4), (4, 1)) -> ReLU ((4, 1)) -> MatMul ((1, 8), (8, 1)) -> ReLU ((8, 1))
        (Layout((8,), ((0,), ())), Layout((2, 4), ((0,), (1,))), ["AllToAll"]),
        (Layout((2, 4), ((0,), ()), ((1, "sum"),)), Layout((2, 4), ((0,), ())), ["AllReduce"]),
        (Layout((2, 4), ((0,), ())), Layout((4, 2), ((0,), ())), ["Slice"]),
        (Layout((4, 2), ((0,), ())), Layout((8,), ((), (0,))), ["Exchange"]),
        (Layout((8,), ((), ()), ((0, "sum"),)), Layout((8,), ((), ())), ["AllReduce"]),
        (Layout((8,), ((), ())), Layout((8,), ((0,), ())), ["Slice"]),
        # with an output strategy, or the next op's cut known, the reduced terms are scattered at once
        (Layout((2, 4), ((0,), ()), ((1, "sum"),)), Layout((8,), ((0,), ())), ["ReduceScatter"]),
        (Layout((2, 4), ((0,), ()), ((1, "sum"),)), Layout((4, 2), ((0,), ())), ["ReduceScatter", "AllReduce"]),
    ],
)
def test_a_chain_of_strategies_on_eight_ranks(source: Layout, target: Layout, steps: list[str]) -> None:
    assert names(check(source, target, ranks(8), ranks(8))) == steps


def test_order_of_axes_within_a_dim() -> None:
    both, swapped = Layout((2, 3), ((0, 1),)), Layout((2, 3), ((1, 0),))
    major, minor = Layout((2, 3), ((0,),)), Layout((2, 3), ((1,),))
    assert [(type(m), m.axes) for m in within_group(both, major) if isinstance(m, AllGather)] == [(AllGather, (1,))]
    for source, target in ((both, minor), (both, swapped), (major, minor)):
        assert names(within_group(source, target)) == ["Exchange"]


def test_two_axes_are_one_collective() -> None:
    both = Layout((2, 3), ((0, 1), ()))
    (move,) = within_group(both, Layout((2, 3), ((), (0, 1))))
    assert isinstance(move, AllToAll)
    assert math.prod(move.after.mesh[axis] for axis in move.axes) == 6
    terms = Layout((2, 2, 3), ((1,), ()), ((0, "sum"), (2, "sum")))
    assert names(within_group(terms, Layout((2, 2, 3), ((1,), ())))) == ["AllReduce"]


def test_two_by_three_to_three_by_two_is_one_exchange() -> None:
    (move,) = check(Layout((2, 3), ((0,), (1,))), Layout((3, 2), ((0,), (1,))), ranks(6), ranks(6))
    assert isinstance(move, Exchange)
    assert bytes_moved([move]).most == Fraction(1, 6)
    whole, cut = Layout((2, 3), ((), ())), Layout((3, 2), ((0,), (1,)))
    assert names(check(whole, cut, ranks(6), ranks(6))) == ["Slice", "Slice"]


def test_terms_are_scattered_before_they_leave_their_group() -> None:
    terms, rows = Layout((2,), ((),), ((0, "sum"),)), Layout((2,), ((0,),))
    assert names(check(terms, rows, (0, 1), (4, 5))) == ["ReduceScatter", "Transfer"]
    assert names(check(terms, Layout((1,), ((),)), (0, 1), (4,))) == ["Reduce", "Transfer"]
    halves = lower(terms, Layout((1,), ((),)), (0, 1), (4,), divisors=(2,))
    assert names(halves) == ["ReduceScatter", "Transfer"]
    assert names(check(terms, terms, (0, 1), (4, 5))) == ["Transfer"]


def test_four_ranks_to_two_others() -> None:
    rows, whole = Layout((4,), ((0,), ())), Layout((2,), ((), ()))
    (move,) = check(rows, whole, (0, 1, 2, 3), (4, 5))
    assert bytes_moved([move]) == Traffic(Fraction(1), Fraction(2))
    assert [part.source for part in move.routes.of_target(5)] == [0, 1, 2, 3]
    (move,) = check(Layout((4,), ((), ())), whole, (0, 1, 2, 3), (4, 5))
    assert [(part.source, part.target) for part in move.routes.parts()] == [(0, 4), (2, 5)]


def test_one_rank_to_four_and_back() -> None:
    one, rows = Layout((1,), ((), ())), Layout((4,), ((0,), ()))
    (there,) = check(one, rows, (2,), (0, 1, 2, 3))
    assert bytes_moved([there]) == Traffic(Fraction(1, 4), Fraction(3, 4))
    (back,) = check(rows, one, (0, 1, 2, 3), (2,))
    assert bytes_moved([back]) == Traffic(Fraction(3, 4), Fraction(3, 4))


def test_who_holds_what_it_needs_gets_no_message() -> None:
    whole = Layout((4,), ((), ()))
    assert check(whole, Layout((2,), ((), ())), (0, 1, 2, 3), (3, 1)) == ()
    assert check(Layout((4,), ((0,), ())), Layout((2, 2), ((0, 1), ())), ranks(4), ranks(4)) == ()
    (move,) = check(whole, Layout((2,), ((0,), ())), (0, 1, 2, 3), (3, 7))
    assert [(part.source, part.target) for part in move.routes.parts()] == [(3, 3), (0, 7)]


def test_replicas_share_the_sending() -> None:
    """3 shards on 2 replicas each, needed whole by 4 others: each of the 6 holders sends to 2 of them."""
    before, after_ = Layout((3, 2), ((0,), ())), Layout((4,), ((), ()))
    routes = Routes(before, after_, ranks(6), (6, 7, 8, 9))
    assert [sum(part.source == rank for part in routes.parts()) for rank in range(6)] == [2] * 6
    exchange = Routes(Layout((2, 2), ((0,), ())), Layout((2, 2), ((), (0,))), ranks(4), ranks(4))
    assert {frozenset((part.source, part.target)) for part in exchange.parts() if part.source != part.target} == {
        frozenset((0, 2)),
        frozenset((1, 3)),
    }


def test_a_part_as_offsets_of_the_shards() -> None:
    routes = Routes(Layout((2,), ((0,), ())), Layout((3,), ((0,), ())), (0, 1), (2, 3, 4))
    first, second = routes.of_target(3)
    assert (first.source, first.span[0]) == (0, (Fraction(1, 3), Fraction(1, 2)))
    assert offsets(within(first.span, span_of(routes.before, 0)), (9, 5)) == ((6, 9), (0, 5))
    assert offsets(within(first.span, span_of(routes.after, 1)), (6, 5)) == ((0, 3), (0, 5))
    assert offsets(within(second.span, span_of(routes.after, 1)), (6, 5)) == ((3, 6), (0, 5))
    with pytest.raises(ValueError, match=r"dim 0 of 8 has no whole place for 2/3\.\.1"):
        offsets(within(first.span, span_of(routes.before, 0)), (8, 5))


def test_meshes() -> None:
    layout = Layout((6, 1, 4), ((2, 0), (1,)), ())
    by_primes = Layout((2, 3, 2, 2), ((2, 3, 0, 1), ()))
    assert normal(by_primes) == normal(layout) == Layout((6, 4), ((1, 0), ()))
    assert normal(Layout((2, 3, 2), ((0, 1),))) == Layout((6, 2), ((0,),))
    assert normal(Layout((2, 3, 2), ((), ()), ((1, "sum"), (2, "sum")))) == Layout((2, 6), ((), ()), ((1, "sum"),))
    assert layout.shards == (24, 1)
    assert on_common_mesh(Layout((6,), ((0,),)), Layout((3, 2), ((1,),))) == (
        Layout((3, 2), ((0, 1),)),
        Layout((3, 2), ((1,),)),
    )
    assert on_common_mesh(Layout((2, 3), ((0,),)), Layout((3, 2), ((0,),))) is None


@pytest.mark.parametrize("mesh", [(2, 3), (2, 2), (4,), (6, 2), (1, 2)], ids=str)
def test_other_meshes_leave_every_shard_where_it_is(mesh: tuple[int, ...]) -> None:
    for layout in layouts(mesh, 2):
        shape = (layout.num_shards(0) * 3, layout.num_shards(1) * 5)
        for index in range(layout.size):
            assert normal(layout).box(index, shape) == layout.box(index, shape)


def test_bytes_are_a_share_of_the_whole() -> None:
    (move,) = within_group(Layout((4,), ((0,), ())), Layout((4,), ((), ())))
    most = bytes_moved([move]).most
    assert share_of(most, 3456) == 2592
    assert share_of(most, 3) == 3
    assert str(share_of(most, ir.SymbolicDim("batch") * 3456)) == "2592*batch"
    assert str(share_of(Fraction(2), ir.SymbolicDim("batch"))) == "2*batch"


def test_what_cannot_be_changed_is_refused() -> None:
    one = Layout((2,), ((),))
    with pytest.raises(ValueError, match="different ranks"):
        lower(one, Layout((2,), ((), ())), (0, 1), (0, 1))
    with pytest.raises(ValueError, match=r"mesh \(2,\) needs 2 distinct ranks, not \(0, 0\)"):
        lower(one, one, (0, 0), (0, 1))
    with pytest.raises(ValueError, match="awaits max and sum"):
        lower(Layout((2, 2), ((),), ((0, "sum"), (1, "max"))), Layout((2, 2), ((),)), ranks(4), ranks(4))
    with pytest.raises(ValueError, match="reduce them first"):
        Routes(Layout((2,), ((),), ((0, "sum"),)), one, (0, 1), (0, 1))
    with pytest.raises(ValueError, match="have no mesh in common"):
        on_common_mesh(one, Layout((3,), ((),)))
