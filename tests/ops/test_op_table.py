"""The op table: an entry is declared once, and what contradicts it is refused where it is declared."""

from __future__ import annotations

import subprocess
import sys

import pytest
from partc.compiler.ops import registry
from partc.compiler.ops.registry import entries, op


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
    code = "from partc.compiler.ops.registry import entries, is_differentiable; print(len(entries()))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(made.stdout) == len(entries())
