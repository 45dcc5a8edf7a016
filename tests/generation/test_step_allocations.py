"""Steps of a decoder make nothing anew, whoever joins and leaves: no plan, session or binding, and no copy of all scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoders import decoder
from step_allocations import PLANS, VOCABULARY, compiled, made_by_steps


@pytest.mark.parametrize("layout", PLANS)
def test_a_step_makes_nothing_anew(layout: str, tmp_path: Path) -> None:
    before, made = made_by_steps(compiled(tmp_path, layout, decoder(fused=True)), 120)
    assert min(before.plans, before.sessions, before.bindings) > 0
    assert (made.steps, made.plans, made.sessions, made.bindings) == (120, 0, 0, 0)
    assert made.largest < 1 << 16 < VOCABULARY * 4 * 4
    assert made.kept < VOCABULARY * 4 * 4
