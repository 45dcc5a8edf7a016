"""Trainings that `partc verify` compares: one whose first steps the loss scale skips, on stages that the plan names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke

MODEL = """
from partc.compiler import Input, nn
nn.seed(3)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
inputs = {"x": Input(["batch", 6], "float32")}
outputs = ["y"]
"""
PLAN = """ranks: 2
symbols: {batch: {divisor: 2}}
precision: {compute: float16, loss_scale: {first: 8388608}}
pipeline: {microbatches: 2, stages: ["0", "1, 2"]}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.01}
"""


def test_skipped_steps_and_named_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "plan.yaml").write_text(PLAN)
    asked = ["verify", str(tmp_path / "model.py"), "--plan", str(tmp_path / "plan.yaml"), "--set", "batch=4"]
    assert invoke(asked) == 0
    told = capsys.readouterr().out
    assert "gradients of the first steps overflow under the loss scale" in told
    assert "0.weight.exp_avg" in told


NORMALIZED = MODEL.replace("8), nn.Tanh()", "8, bias=False), nn.BatchNorm2d(8), nn.Dropout(0.3)").replace(
    "8, 3))", "8, 3)).train()"
)
OF_MICROBATCHES = """ranks: 4
mesh: {pp: 2, dp: 2}
symbols: {batch: {divisor: 4}}
dataset: {x: [dp, null], label: [dp]}
pipeline: {microbatches: 2, statistics: microbatch, stages: [{nodes: "0", on: {pp: 0}}, {nodes: "1, 2, 3", on: {pp: 1}}]}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.01}
"""


def test_statistics_of_microbatches_are_of_the_same_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(NORMALIZED)
    (tmp_path / "plan.yaml").write_text(OF_MICROBATCHES)
    asked = ["verify", str(tmp_path / "model.py"), "--plan", str(tmp_path / "plan.yaml"), "--set", "batch=16"]
    assert invoke(asked) == 0, capsys.readouterr().out


PLAIN = """ranks: 2
symbols: {batch: {divisor: 2}}
dataset: data_parallel
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: sgd, lr: 0.1}
"""


def test_what_input_leaves_out_is_random_in_the_sizes_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels among the classes, as many as there are records in the file; a size that the file does not have is refused."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "plan.yaml").write_text(PLAIN)
    np.savez_compressed(tmp_path / "x.npz", x=np.random.default_rng(1).standard_normal((12, 6)).astype(np.float32))
    asked = ["verify", str(tmp_path / "model.py"), "--plan", str(tmp_path / "plan.yaml")]
    given = [*asked, "--input", str(tmp_path / "x.npz")]
    assert invoke(given) == 0
    shown = capsys.readouterr()
    assert "random values, seed 0: label" in shown.err
    assert "equal to the unsharded model's" in shown.out
    assert invoke([*given, "--set", "batch=4"]) == 2
    assert "--set batch=4: it is 12 by input 'x'" in capsys.readouterr().err
