"""Sessions of many nodes, whose buffers onnxruntime does not plan: a training has the same bits and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.runtime.program import sessions
from training_equivalence import run, source_of
from training_models import gpt

PLAN = """ranks: 2
mesh: {dp: 2}
symbols: {batch: {divisor: 4, max: 4}, seq: {max: 8}}
dataset: {x: [dp, null], labels: [dp, null]}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: labels, axis: 2}
  optimizer: {type: adamw, lr: 0.01, shard: dp}
"""


def test_a_large_session_has_the_bits_of_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"width": 12, "layers": 1, "heads": 2, "vocabulary": 24, "context": 9}
    rng, made, runs = np.random.default_rng(3), list[bool](), []
    steps = [gpt(**sizes).feeds(rng, batch=4, seq=size) for size in (6, 6, 8)]
    new_session = sessions.new_session

    def recorded(*given: object) -> sessions.Session:
        made.append(bool(given[-1]))
        return new_session(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(sessions, "new_session", recorded)
    for limit in (10_000, 1):
        made.clear()
        monkeypatch.setattr(sessions, "LARGE", limit)
        runs.append(run(source_of(gpt(**sizes)), PLAN, tmp_path / str(limit), steps, check=False))
        assert {*made} == {limit == 1}
    small, large = runs
    assert [step["loss"].tobytes() for step in large.outputs] == [step["loss"].tobytes() for step in small.outputs]
    assert {name: array.tobytes() for name, array in large.after.items()} == {
        name: array.tobytes() for name, array in small.after.items()
    }
