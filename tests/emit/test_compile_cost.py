"""What a compile costs stays within a budget: Python calls and bytes, which no noise of a machine moves."""

import json
from pathlib import Path

import pytest
from compile_cost import calls_in_stages, counted

BUDGET = Path(__file__).parent / "compile_budget.json"
MARGIN = 0.05
"""Versions of libraries move the calls a little."""


def test_a_compile_costs_what_it_did(pytestconfig: pytest.Config) -> None:
    found = counted()
    if pytestconfig.getoption("--update-golden"):
        budgets = {name: {"calls": costs["calls"], "bytes": costs["bytes"]} for name, costs in found.items()}
        BUDGET.write_text(json.dumps(budgets, indent=1) + "\n")
        return
    budgets = json.loads(BUDGET.read_text())
    assert budgets.keys() == found.keys()
    over = [
        f"{name}: {costs[what]:,} {what}, {costs[what] / limit - 1:+.1%} of the budget {limit:,}; by pass: "
        + "  ".join(f"{step} {calls:,}" for step, calls in costs.items())
        for name, costs in found.items()
        for what, limit in budgets[name].items()
        if costs[what] > limit * (1 + MARGIN)
    ]
    assert not over, "\n".join(
        [
            "compiles cost more:",
            *over,
            "`python tests/support/compile_cost.py` prints all as a table; --update-golden accepts it",
        ]
    )


def test_ranks_in_stages_cost_what_their_programs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 ranks of each stage against two: a program for every rank would cost several times as much."""
    monkeypatch.delenv("PARTC_VERIFY_PASSES", raising=False)
    calls_in_stages(4, tmp_path / "warm")  # modules are imported, caches filled
    few, many = calls_in_stages(4, tmp_path / "few"), calls_in_stages(32, tmp_path / "many")
    assert many < 1.2 * few, f"{few:,} calls for 4 ranks and {many:,} for 32"
