"""Ways of a chain of blocks: the path equals all choices on small chains, and integer programming on 48 blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from partc.compiler.search.blocks import Chain, shortest, within


def chain(blocks: int, seed: int, ways: int = 3) -> Chain:
    """Random costs, with some ways that cannot follow others."""
    random = np.random.default_rng(seed)
    seconds, memory = (list(random.uniform(1, 5, (blocks, ways))) for _ in range(2))
    between = list(random.uniform(0, 3, (blocks - 1, ways, ways)))
    for table in between:
        table[1, 0] = np.inf
    return Chain(seconds, memory, between)


def all_choices(one: Chain, limit: float = np.inf) -> float:
    ways = itertools.product(*(range(len(table)) for table in one.seconds))
    return min(seconds for chosen in ways if (cost := one.cost(chosen))[1] <= limit for seconds in cost[:1])


def programmed(one: Chain, limit: float = np.inf) -> float:
    """The least seconds by HiGHS: one variable for each way of a block, and for each pair of ways of two."""
    optimize = pytest.importorskip("scipy.optimize")
    blocks, ways = len(one.seconds), len(one.seconds[0])
    begin = blocks * ways
    cost = np.concatenate([*one.seconds, *(table.ravel() for table in one.between)])
    possible, cost = np.isfinite(cost), np.where(np.isfinite(cost), cost, 0)
    rows, low, high = [], [], []
    for k in range(blocks):
        row = np.zeros(len(cost))
        row[k * ways : (k + 1) * ways] = 1
        rows, low, high = [*rows, row], [*low, 1], [*high, 1]
    for k, a, side in itertools.product(range(blocks - 1), range(ways), (0, 1)):
        row, pairs = np.zeros(len(cost)), np.arange(ways * ways).reshape(ways, ways)
        row[begin + k * ways * ways + (pairs[a] if side == 0 else pairs[:, a])] = 1
        row[(k + side) * ways + a] = -1
        rows, low, high = [*rows, row], [*low, 0], [*high, 0]
    rows, low, high = [*rows, np.concatenate([*one.memory, np.zeros(len(cost) - begin)])], [*low, 0], [*high, limit]
    found = optimize.milp(
        cost,
        integrality=np.arange(len(cost)) < begin,
        bounds=optimize.Bounds(0, possible.astype(float)),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
    )
    return float(found.fun)


@pytest.mark.parametrize("seed", range(6))
def test_a_small_chain_equals_all_choices(seed: int) -> None:
    one = chain(6, seed)
    assert one.cost(shortest(one))[0] == pytest.approx(all_choices(one))
    limit = 0.9 * one.cost(shortest(one))[1]
    found = within(one, limit, steps=1 << 14)
    assert found is not None
    seconds, memory = one.cost(found)
    assert memory <= limit
    assert seconds == pytest.approx(all_choices(one, limit), rel=2e-3)
    assert within(one, 0.9 * sum(float(table.min()) for table in one.memory)) is None


def test_48_blocks_equal_integer_programming() -> None:
    one = chain(48, 7)
    least = one.cost(shortest(one))
    assert least[0] == pytest.approx(programmed(one))
    limit = 0.9 * least[1]
    found = within(one, limit, steps=1 << 13)
    assert found is not None
    assert programmed(one, limit) - 1e-9 <= one.cost(found)[0] <= 1.01 * programmed(one, limit)
