"""What a rank takes for nodes with sums of a layer between them: not above the best order, and as long where that is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from partc.cli.simulation.known_program import Layers, Program, Sum
from partc.cli.simulation.node_sets import Placed, Priced, Sets, Shared

Graph = Sequence[tuple[Sequence[int], int]]
"""By node those that it reads, and its stage."""


def program(graph: Graph, forward: int = 0, gradients: Sequence[int] = ()) -> Program:
    """A program whose nodes all depend on the batch; the first `forward` of them make the loss."""
    found = object.__new__(Program)
    found.nodes = [(SimpleNamespace(op_type="Relu"), None) for _ in graph]  # type: ignore[misc]
    found.paths = [f"stage{stage}" for _, stage in graph]
    found.reads, found.makes = (
        [[f"v{one}" for one in read] for read, _ in graph],
        [[f"v{k}"] for k in range(len(graph))],
    )
    found.maker = {f"v{k}": k for k in range(len(graph))}
    found.updated = {f"v{k}" for k in gradients}
    found._in_tasks = {}
    found.__dict__.update(forward=(1 << forward) - 1, backward=0, repeated=np.ones(len(graph), dtype=bool))
    return found


def placed(graph: Graph, count: int, forward: int = 0, gradients: Sequence[int] = ()) -> Placed:
    """The nodes on their stages."""
    return Placed(program(graph, forward, gradients), count, lambda path: range(int(path[5:]), int(path[5:]) + 1))


def fastest(graph: Graph, seconds: Sequence[float], sums: dict[int, float]) -> float:
    """Seconds of the best order of all nodes on one rank, which sums up what some make: one sum at a time, beside nodes."""
    best = float("inf")
    for order in itertools.permutations(range(len(graph))):
        clock = link = 0.0
        ready = dict[int, float]()
        for one in order:
            if any(read not in ready for read in graph[one][0]):
                break
            clock = max([clock, *(ready[read] for read in graph[one][0])]) + seconds[one]
            ready[one] = clock
            if one in sums:
                link = ready[one] = max(clock, link) + sums[one]
        else:
            best = min(best, clock)
    return best


def took(graph: Graph, seconds: Sequence[float], sums: dict[int, float], session: float = 0.0) -> float:
    """What all nodes take on one stage at least."""
    on = placed(graph, 1)
    shared = Shared(on, Layers(np.zeros(len(graph), dtype=bool), [Sum(one, lambda parts: 0.0) for one in sums]))
    of_sums = np.array([sums[int(one)] for one in shared.nodes])
    each = np.array(seconds, dtype=float)
    return float(Sets(on, shared, on.own).took(Priced(each, each, of_sums, 1.0, session, None))[0])


def test_no_order_is_below_it() -> None:
    """Random nodes, two of which are summed up."""
    chance = random.Random(3)
    waited = 0
    for _ in range(60):
        graph = [([one for one in range(k) if chance.random() < 0.4], 0) for k in range(6)]
        seconds = [chance.randint(1, 5) for _ in graph]
        sums = {one: chance.randint(1, 9) for one in chance.sample(range(5), 2)}
        found = took(graph, seconds, {one: float(many) for one, many in sums.items()})
        assert found <= fastest(graph, seconds, {one: float(many) for one, many in sums.items()})
        waited += found > sum(seconds)
    assert waited > 5


def test_a_chain_waits_for_each_sum_and_ends_a_session() -> None:
    """What depends on no sum fills what the rank waits for one."""
    chain: Graph = [([], 0), ([0], 0), ([1], 0)]
    assert took(chain, [2, 3, 4], {0: 5.0, 1: 1.0}) == 15.0 == fastest(chain, [2, 3, 4], {0: 5.0, 1: 1.0})
    assert took(chain, [2, 3, 4], {0: 5.0, 1: 1.0}, session=1.0) == 18.0
    beside: Graph = [*chain, ([], 0)]
    assert took(beside, [2, 3, 4, 4], {0: 5.0}) == 14.0 == fastest(beside, [2, 3, 4, 4], {0: 5.0})


def test_a_way_goes_through_all_stages_and_back() -> None:
    """Two stages with a loss on the second one; what only feeds a gradient is on no way."""
    graph: Graph = [([], 0), ([0], 0), ([1], 1), ([2], 1), ([3], 1), ([3], 1), ([4], 0), ([6, 0], 0)]
    on = placed(graph, 2, forward=3, gradients=[5, 7])
    assert on.is_chain
    assert [np.flatnonzero(one).tolist() for one in on.way] == [[0, 1], [2, 3, 4], [6, 7]]
    assert [np.flatnonzero(one).tolist() for one in on.forward] == [[0, 1], [2]]
    assert [np.flatnonzero(one).tolist() for one in on.early] == [[6, 7], [3, 4]]
    assert on.of_weights[5]
    assert not on.of_weights[4]


def test_the_longest_of_what_follows_one_another() -> None:
    """Two branches that meet, of which the second takes longer."""
    graph: Graph = [([], 0), ([0], 0), ([0], 1), ([1, 2], 1), ([], 0)]
    assert program(graph, 5, []).longest(np.array([1.0, 2.0, 4.0, 8.0, 3.0])) == 1.0 + 4.0 + 8.0


@pytest.mark.parametrize("stages", [(0, 1, 0, 1), (1, 0, 1, 0)])
def test_there_is_no_way_where_values_go_back(stages: Sequence[int]) -> None:
    """A stage that reads forward of a later one."""
    graph: Graph = [([k - 1] if k else [], stage) for k, stage in enumerate(stages)]
    assert not placed(graph, 2, forward=4).is_chain
