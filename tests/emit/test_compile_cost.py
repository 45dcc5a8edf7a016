"""What a compile costs stays within a budget: Python calls and bytes, which no noise of a machine moves."""

import json
from pathlib import Path

import pytest
from compile_cost import MODELS, calls_in_stages, counted

BUDGET = Path(__file__).parent / "compile_budget.json"
MARGIN = 0.05
"""Versions of libraries move the calls a little."""


@pytest.mark.parametrize("name", MODELS)
def test_a_compile_costs_what_it_did(name: str, pytestconfig: pytest.Config) -> None:
    found = counted(name)
    budgets = json.loads(BUDGET.read_text())
    if pytestconfig.getoption("--update-golden"):
        budgets[name] = {"calls": found["calls"], "bytes": found["bytes"]}
        BUDGET.write_text(json.dumps(budgets, indent=1) + "\n")
        return
    over = {
        what: f"{found[what]:,} {what}, {found[what] / limit - 1:+.1%} of the budget {limit:,}"
        for what, limit in budgets[name].items()
        if found[what] > limit * (1 + MARGIN)
    }
    by_pass = "  ".join(f"{step} {calls:,}" for step, calls in found.items())
    assert not over, (
        f"a compile of {name} costs more: {'; '.join(over.values())}; by pass: {by_pass}; "
        "`python tests/support/compile_cost.py` prints this table; --update-golden accepts it"
    )


def test_ranks_in_stages_cost_what_their_programs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 ranks of each stage against four: a program for every rank would cost five times as much."""
    monkeypatch.delenv("PARTC_VERIFY_PASSES", raising=False)
    calls_in_stages(8, tmp_path / "warm")  # modules are imported, caches filled
    few, many = calls_in_stages(8, tmp_path / "few"), calls_in_stages(64, tmp_path / "many")
    assert many < 1.2 * few, f"{few:,} calls for 8 ranks and {many:,} for 64"
