"""Inputs that lie in the same arrays in many steps: a rank reads them once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from artifact_text import write
from partc.runtime import load_local
from partc.runtime.execution.inputs import SameArrays
from partc.runtime.execution.symbol_bindings import Binder

PING_PONG = [
    """rank0 (float[batch, 3] x) => (float[batch, 3] y) <float[batch, 3] h, float[batch, 3] k>
    { h = Relu(x) = partc.comm.Send <peer = 1, tag = 0> (h) k = partc.comm.Recv <peer = 1, tag = 1> () y = Sub(k, h) }""",
    """rank1 () => () <float[batch, 3] h, float[batch, 3] k, float c = {0.5}>
    { h = partc.comm.Recv <peer = 0, tag = 0> () k = Mul(h, c) = partc.comm.Send <peer = 0, tag = 1> (k) }""",
]
ALONE = [
    "rank0 (float[batch, 3] x) => (float[batch, 3] y) <float[batch, 3] h, float c = {-0.5}> { h = Relu(x) y = Mul(h, c) }"
]


@pytest.mark.parametrize("graphs", [PING_PONG, ALONE], ids=["two ranks", "one rank"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_same_arrays_are_read_once_and_their_numbers_in_each_step(
    tmp_path: Path, graphs: list[str], order: Literal["C", "F"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of other inputs between them change nothing; an array of which the runtime makes a copy is read in each step."""
    given, other = np.arange(15, dtype=np.float32).reshape(5, 3).copy(order), np.full((5, 3), 7, np.float32)
    looked, read = list[str](), Binder._read
    monkeypatch.setattr(Binder, "_read", lambda self, inputs: looked.append("") or read(self, inputs))
    with load_local(write(tmp_path, graphs)) as program:
        same = SameArrays({"x": given})
        for k in range(4):
            given += k
            made = program.step_of_all(same)[0]["y"]
            np.testing.assert_array_equal(made, np.maximum(given, 0) * np.float32(-0.5))
            if k == 1:
                assert program.step_of_all({"x": other})[0]["y"][0, 0] == np.float32(-3.5)
    assert len(looked) == (2 if order == "C" else 5) + 2 * len(graphs[1:])  # the second rank reads none
