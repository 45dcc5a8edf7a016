"""Risky graphs with random plans are equal to the unsharded model, or refused by the compile; many more by `random_cases.py` itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from random_cases import EQUAL, WRONG, Case, cases, outcome


def test_risky_graphs_run_as_the_whole_or_are_refused() -> None:
    tally = Counter[str]()

    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def one(case: Case) -> None:
        what, text = outcome(case)
        tally[what] += 1
        assert what not in WRONG, f"{what}: {text}\n{case.plan}"

    one()
    assert tally[EQUAL] > 1, tally
