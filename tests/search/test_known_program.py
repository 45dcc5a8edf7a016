"""The longest way of a rank's task: not above the best of all schedules, and as long where that is known to be exact."""

from __future__ import annotations

import itertools
import random

import pytest
from partc.cli.simulation.known_program import Known, Task


def fastest(nodes: list[Known]) -> float:
    """Seconds of the best order of all nodes on one rank, each begun at its head at the earliest, with its tail behind."""
    best = float("inf")
    for order in itertools.permutations(nodes):
        clock = end = 0.0
        for one in order:
            clock = max(clock, one.head) + one.seconds
            end = max(end, clock + one.tail)
        best = min(best, end)
    return best


@pytest.mark.parametrize("what", ["both", "heads", "tails"])
def test_no_schedule_is_below_the_longest_way(what: str) -> None:
    """With heads alone, or tails alone, it is the best schedule."""
    chance = random.Random(3)
    for _ in range(40):
        nodes = [
            Known(
                f"n{k}",
                chance.randint(1, 5),
                0 if what == "tails" else chance.randint(0, 9),
                0 if what == "heads" else chance.randint(0, 9),
            )
            for k in range(5)
        ]
        found = Task(nodes, 0.0).longest({one.path for one in nodes}, 1, {})
        assert found <= fastest(nodes)
        if what != "both":
            assert found == fastest(nodes)


def test_updates_follow_all_microbatches() -> None:
    """A first stage waits for the cotangent; two microbatches are computed behind the head of the first, and the update once."""
    task = Task([Known("a", 2.0, 0.0, 10.0), Known("a", 3.0, 9.0, 0.0), Known("b", 4.0, 2.0, 6.0)], 0.0)
    assert task.longest({"a"}, 1, {}) == 12.0
    assert task.longest({"a"}, 2, {"a": 7.0, "b": 100.0}) == 17.0
    assert task.longest({"b"}, 1, {}) == 12.0
