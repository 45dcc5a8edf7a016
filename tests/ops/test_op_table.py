"""The op table: an entry is declared once, and what contradicts it is refused where it is declared."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from partc.compiler.ops import registry
from partc.compiler.ops.registry import entries, entry_of_op, op
from rule_case import feeds_of, node_of, run
from rules_case import CASES


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the table, which tests may change."""
    registry.load()
    monkeypatch.setattr(registry, "TABLE", dict(registry.TABLE))


def test_what_contradicts_an_entry_is_refused() -> None:
    made = op("Made", factors="*->*")
    made.gradient(lambda g, dy, x: dy)
    with pytest.raises(ValueError, match="Made has two functions 'rule'"):
        made.gradient(lambda g, dy, x: dy)
    with pytest.raises(ValueError, match="two entries for Made"):
        op("Made", factors="*->*")
    with pytest.raises(ValueError, match="Other: an op has factors, or a reason"):
        op("Other")
    with pytest.raises(ValueError, match="Stops stops gradients, and has a gradient"):
        op("Stops", factors="*->*", stops_gradient=True).gradient(lambda g, dy, x: dy)


def test_a_letter_in_prose_does_not_make_an_op_replicated() -> None:
    found = {entry.op_type for entry in entries() if entry.notation.shardable}
    assert {"Split", "Concat", "Pad", "QuantizeLinear"} <= found


def test_the_first_look_up_fills_the_table() -> None:
    code = "from partc.compiler.ops.registry import entries, has_gradient_rule; print(len(entries()))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(made.stdout) == len(entries())


def test_what_moves_computes_nothing() -> None:
    """Every element that an op in the column `moves` makes is one of its operands, or nothing: a pad."""
    tried, wrong = set(), []
    for this in CASES:
        entry = entry_of_op(this.domain, this.op_type)
        if entry is None or not entry.moves:
            continue
        feeds = feeds_of(this)
        for array in run([node_of(this, feeds=feeds)], feeds, {}, this):
            there = np.concatenate([np.zeros(1), *(one.ravel() for one in feeds.values() if one.dtype == array.dtype)])
            wrong += [] if np.isin(array, there).all() else [str(this)]
        tried.add(this.op_type)
    assert not wrong
    assert {"Transpose", "Gather", "Pad", "Tile", "Squeeze"} <= tried


def test_how_an_op_rounds_follows_from_its_kernel() -> None:
    by_name = {entry.name: entry for entry in entries()}
    rounding = {name: by_name[name].rounding for name in ("Add", "Exp", "ReduceMax", "ReduceSum", "Slice", "Where")}
    assert rounding == {
        **{"Add": "once", "Exp": "sums", "ReduceMax": "exact", "ReduceSum": "sums", "Slice": "exact"},
        "Where": "exact",
    }
    places = {name: [*by_name[name].rounded(3)] for name in ("Gemm", "Pow", "ScatterND", "Add", "Sum", "Softmax")}
    assert places == {"Gemm": [0, 1, 2], "Pow": [0], "ScatterND": [2], "Add": [], "Sum": [0, 1, 2], "Softmax": [0]}


def test_what_rises_makes_the_largest_of_the_largest() -> None:
    """In any one of its floating-point operands, the others being the same."""
    tried, wrong = set(), []
    for this in CASES:
        entry = entry_of_op(this.domain, this.op_type)
        if entry is None or not (entry.rising or entry.moves):
            continue
        first = feeds_of(this)
        for name, one in first.items():
            if one.dtype.kind != "f" or not one.ndim or int(name[1:]) in this.constants:
                continue
            second = {**first, name: one[::-1].copy()}
            largest = {**first, name: np.maximum(one, second[name])}
            node = node_of(this, feeds=first)
            ones, others, wanted = (run([node], feeds, {}, this) for feeds in (first, second, largest))
            pairs = zip(ones, others, wanted, strict=True)
            wrong += [] if all(np.allclose(np.maximum(a, b), c, equal_nan=True) for a, b, c in pairs) else [str(this)]
            tried.add(this.op_type)
    assert not wrong
    assert {"Add", "Cast", "Exp", "Gather", "Max", "Sqrt", "Transpose"} <= tried
