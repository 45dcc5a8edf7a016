"""Strategies to mesh axes: integers and names against their definition, rank by rank, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from partc.compiler.layout.layout import Layout
from partc.compiler.ops.rule import Rule
from partc.compiler.sharding.seeding.strategy import WrongStrategy, assign_integers, from_names, refined, to_axes
from rows import of_today

MATMUL = Rule(("mk", "kn"), ("mn",), reduce={"k": "sum"})
RELU = Rule(("ab",), ("ab",))
BIAS = Rule(("mk", "kn", "n"), ("mn",), reduce={"k": "sum"})
BATCHED = Rule(("bmk", ".kn"), ("bmn",), reduce={"k": "sum"})
SOFTMAX = Rule(("abc",), ("abc",), replicated=frozenset("c"))
ABSENT = Rule(("ab", None, "b"), ("ab",))


def divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def coordinates(index: int, matrix: Sequence[int]) -> list[int]:
    """Row-major, last axis fastest."""
    found = []
    for size in reversed(matrix):
        index, coordinate = divmod(index, size)
        found.append(coordinate)
    return found[::-1]


def facts(rule: Rule, cuts: Sequence[Sequence[int] | None], ranks: int) -> list[str]:
    with pytest.raises(WrongStrategy) as caught:
        assign_integers(rule, cuts, ranks)
    return [violation.fact for violation in caught.value.violations]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, *of_today([8, 12], 1)])
def test_integers_are_the_device_matrix_with_the_repeat_last(ranks: int) -> None:
    """Every strategy of a MatMul with cuts of up to `ranks` is taken as the definition says, or refused."""
    taken = 0
    for a, b, c, d in itertools.product(range(1, ranks + 1), repeat=4):
        cuts = ((a, b), (c, d))
        if b != c or ranks % (a * b * d):
            assert facts(MATMUL, cuts, ranks)
            continue
        taken += 1
        shards = assign_integers(MATMUL, cuts, ranks)
        assert shards == {"m": a, "k": b, "n": d}
        mesh, axes = to_axes(shards, MATMUL.factors, ranks)
        assert math.prod(mesh) == ranks
        assert all(size in (2, 3, 5, 7, 11) for size in mesh)
        layout = Layout(mesh, (axes["m"], axes["k"], axes["n"]))
        matrix = (a, b, d, ranks // (a * b * d))
        assert [list(layout.shard(k)) for k in range(ranks)] == [coordinates(k, matrix)[:3] for k in range(ranks)]
    assert taken == sum(ranks % (a * b * d) == 0 for a, b, d in itertools.product(divisors(ranks), repeat=3))


def test_the_origins_examples() -> None:
    assert to_axes(assign_integers(MATMUL, ((2, 4), (4, 1)), 8), "mkn", 8) == (
        (2, 2, 2),
        {"m": (0,), "k": (1, 2), "n": ()},
    )
    assert to_axes(assign_integers(MATMUL, ((2, 2), (2, 1)), 8), "mkn", 8) == (
        (2, 2, 2),
        {"m": (0,), "k": (1,), "n": ()},
    )
    mesh, axes = to_axes(assign_integers(RELU, ((4, 1),), 8), "ab", 8)
    assert [Layout(mesh, (axes["a"], axes["b"])).shard(rank)[0] for rank in range(8)] == [
        rank // 2 for rank in range(8)
    ]


def test_cuts_of_six_keep_their_order_of_primes() -> None:
    assert to_axes({"a": 6, "b": 2}, "ab", 24) == ((2, 3, 2, 2), {"a": (0, 1), "b": (2,)})
    assert to_axes({"b": 3, "a": 2}, "ab", 6) == ((2, 3), {"a": (0,), "b": (1,)})
    assert to_axes({}, "ab", 6) == ((2, 3), {})
    for shards, factors in (({"a": 4}, "ab"), ({"c": 2}, "ab")):
        with pytest.raises(ValueError, match="is no cut over 6 ranks"):
            to_axes(shards, factors, 6)


def test_what_is_not_given_is_left_open() -> None:
    assert assign_integers(MATMUL, ((2, 4), None), 8) == {"m": 2, "k": 4}
    assert assign_integers(MATMUL, (None, (3, 2)), 6) == {"k": 3, "n": 2}
    assert assign_integers(MATMUL, (None, None), 6) == {}
    assert assign_integers(BIAS, ((1, 4), (4, 2), None), 8) == {"m": 1, "k": 4, "n": 2}
    assert assign_integers(SOFTMAX, ((2, 1, 1),), 4) == {"a": 2, "b": 1}
    assert from_names(MATMUL, ((("dp",), ()), None), (("dp", 2), ("tp", 3))) == {"m": (0,), "k": ()}


@pytest.mark.parametrize("cuts", [((2, 3), (3,)), ((2, 3), None, (3,)), ((2, 3), (), (3,))])
def test_absent_inputs_have_an_entry_or_none(cuts: tuple[tuple[int, ...] | None, ...]) -> None:
    assert assign_integers(ABSENT, cuts, 6) == {"a": 2, "b": 3}
    assert facts(ABSENT, ((2, 3), (3,), (3,)), 6) == ["input 1 is cut, but is absent or no tensor"]


def test_what_is_wrong_is_said_at_once() -> None:
    with pytest.raises(WrongStrategy) as caught:
        assign_integers(BATCHED, ((2, 3, 4), (2, 2, 5)), 8)
    assert [str(problem) for problem in caught.value.problems("plan.yaml:7", "sharding of 'up' (MatMul)")] == [
        "plan.yaml:7: sharding of 'up' (MatMul): input 1, dim 0 is cut into 2, but stays whole\n"
        "  it broadcasts, or the op needs it replicated\n  help: write 1",
        "plan.yaml:7: sharding of 'up' (MatMul): input 0, dim 2 is cut into 4, but input 1, dim 1 into 2\n"
        "  these dims correspond: they are cut alike",
    ]
    assert facts(MATMUL, ((2, 4),), 8) == ["the strategy has 1 input, but the op has 2"]
    assert facts(MATMUL, ((2, 4), (4, 1), (1,)), 8) == ["the strategy has 3 inputs, but the op has 2"]
    assert facts(MATMUL, ((2,), (4, 1, 1)), 8) == [
        "input 0 is cut in 1 dims, but has 2",
        "input 1 is cut in 3 dims, but has 2",
    ]
    assert facts(SOFTMAX, ((1, 1, 2),), 8) == ["input 0, dim 2 is cut into 2, but stays whole"]
    assert facts(MATMUL, ((2, 4), (4, 2)), 8) == ["the strategy has 16 shards, but the group has 8 ranks"]
    with pytest.raises(WrongStrategy) as caught:
        assign_integers(MATMUL, ((2, 2), (2, 1)), 6)
    (violation,) = caught.value.violations
    assert violation.law == "the product of the cuts, 2 * 2, divides the number of ranks"
    assert violation.help == "cut into 1, 2, 3 or 6 shards"


@pytest.mark.parametrize("mesh", [(("dp", 2), ("tp", 4)), (("dp", 3), ("one", 1), ("tp", 2)), (("x", 6), ("y", 2))])
def test_names_cut_by_the_coordinates_of_their_axes(mesh: tuple[tuple[str, int], ...]) -> None:
    """Every way to give the axes to the factors of a MatMul, in both orders where two cut one."""
    names, sizes = [name for name, _ in mesh], dict(mesh)
    ranks = math.prod(sizes.values())
    fine, _ = refined(mesh)
    assert math.prod(fine) == ranks
    for homes in itertools.product(["", "m", "k", "n"], repeat=len(names)):
        for order in (names, names[::-1]):
            given = {f: tuple(n for n in order if homes[names.index(n)] == f) for f in "mkn"}
            axes = from_names(MATMUL, ((given["m"], given["k"]), (given["k"], given["n"])), mesh)
            layout = Layout(fine, (axes["m"], axes["k"], axes["n"]))
            for rank in range(ranks):
                at = dict(zip(names, coordinates(rank, list(sizes.values())), strict=True))
                expected = []
                for factor in "mkn":
                    number = 0
                    for name in given[factor]:
                        number = number * sizes[name] + at[name]
                    expected.append(number)
                assert list(layout.shard(rank)) == expected


def test_names_that_do_not_fit() -> None:
    mesh = (("dp", 2), ("tp", 4))

    def said(
        rule: Rule, *cuts: tuple[tuple[str, ...], ...] | None, mesh: tuple[tuple[str, int], ...] = mesh
    ) -> list[str]:
        with pytest.raises(WrongStrategy) as caught:
            from_names(rule, cuts, mesh)
        return [violation.fact for violation in caught.value.violations]

    assert said(MATMUL, (("dp",), ("tp",)), (("dp",), ())) == [
        "input 0, dim 1 is cut along tp, but input 1, dim 0 along dp"
    ]
    assert said(MATMUL, (("tp",), ()), ((), ("tp",))) == [
        "the axis 'tp' cuts input 0, dim 0 and input 1, dim 1, which differ",
    ]
    assert said(MATMUL, (("dp", "tp"), ()), (("tp",), ())) == [
        "input 0, dim 1 is cut not at all, but input 1, dim 0 along tp",
    ]
    assert said(SOFTMAX, ((), (), ("dp", "tp"))) == ["input 0, dim 2 is cut along dp, tp, but stays whole"]
    assert said(RELU, (("pp",), ("ep",))) == ["'pp', 'ep' are not axes of it"]
    assert said(RELU, (("dp",), ()), mesh=()) == ["'dp' is not an axis of it"]
