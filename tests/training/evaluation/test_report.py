"""The further numbers of progress lines are the unsharded model's under every plan."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.runtime.checker.check import check_artifact
from partc.runtime.checkpoint.checkpoint import Checkpoint
from training_command_case import folder

__all__ = ["folder"]

MODEL = """
from partc.compiler import Input, Symbol, nn
nn.seed(3)
batch, seq = Symbol(divisor=2), Symbol()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(16, 12), nn.Linear(12, 16), nn.Linear(16, 6)
    def forward(self, op, x):
        return self.b(op, op.Tanh(self.a(op, self.table(op, x))))
model = Net()
inputs = {"x": Input([batch, seq], "int64")}
outputs = ["y"]
"""
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: sgd, lr: 0.5}
  data: data.npz
  batch: 12
  log: 1
  steps: 3
  shuffle: false
  checkpoint: {folder: NAME.runs, every: 1}
  report: [gradient_norm, parameter_norm, tokens, memory]
"""
PLANS = {
    "one": "ranks: 1\n" + TRAIN,
    "dp": "ranks: 2\ndataset: data_parallel\n" + TRAIN + "  accumulate: 3\n",
    "tp": "ranks: 2\nsharding: {a: colwise, b: rowwise}\n" + TRAIN + "  clip: {norm: 1.0e9}\n",
    "scaled": "ranks: 2\nplacement: {table: 0, a: 0, b: 1}\nprecision: {compute: float16}\n" + TRAIN,
}


def test_they_are_the_unsharded_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    np.savez(folder / "data.npz", x=rng.integers(0, 16, (60, 5)), label=rng.integers(0, 6, (60, 5)))
    (folder / "model.py").write_text(MODEL)
    found = {}
    for name, plan in PLANS.items():
        (folder / f"{name}.yaml").write_text(plan.replace("NAME", name))
        assert invoke(["compile", "model.py", "--plan", f"{name}.yaml", "-o", name, "-q"]) == 0
        assert check_artifact(folder / name) == []
        words = ["--plan", f"{name}.yaml", "--in-process", "--threads", "1", "--metrics", f"{name}.jsonl"]
        assert invoke(["train", name, *words]) == 0
        lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        found[name] = [row for row in lines if row["kind"] == "train"]
    assert all(
        " tokens/s   memory " in line for line in capsys.readouterr().out.splitlines() if line.startswith("step")
    )
    before, after = (Checkpoint.open(folder / f"one.runs/step_0000000{step}") for step in (2, 3))
    weights = [(before.read(one).astype(np.float64), after.read(one)) for one in after.index.tensors]
    gradient = np.sqrt(sum(((old - new) ** 2).sum() for old, new in weights)) / 0.5
    assert found["one"][2]["gradient_norm"] == pytest.approx(gradient, rel=1e-4)
    assert found["one"][2]["parameter_norm"] == pytest.approx(
        np.sqrt(sum((new**2).sum() for _, new in weights)), rel=1e-5
    )
    for name, rows in found.items():
        tolerance = 2e-2 if name == "scaled" else 1e-5
        for row, whole in zip(rows, found["one"], strict=True):
            for key in ("gradient_norm", "parameter_norm"):
                assert row[key] == pytest.approx(whole[key], rel=tolerance), (name, key)
            assert row["tokens_per_second"] / row["records_per_second"] == pytest.approx(5, rel=1e-2)
            assert 1 << 24 < row["memory_bytes"] < 1 << 36


LARGE = """from partc.compiler import Input, Symbol, nn
model = nn.Linear(1100, 2048, bias=False)
inputs = {"x": Input([Symbol(), 1100])}
outputs = ["y"]
"""


@pytest.mark.parametrize("plan", ["ranks: 1\n", "ranks: 2\nsharding: {'**': colwise}\n"])
def test_the_norm_of_a_large_gradient_is_exact(folder: Path, plan: str) -> None:
    """Its squares are added by rows: onnxruntime adds two million at once with an error of 8e-5."""
    rng = np.random.default_rng(1)
    np.savez(folder / "data.npz", x=rng.standard_normal((12, 1100), np.float32), label=rng.integers(0, 2048, 12))
    (folder / "model.py").write_text(LARGE)
    train = (
        TRAIN.replace("steps: 3", "steps: 2").replace("NAME", "large").replace(", parameter_norm, tokens, memory", "")
    )
    train = train.replace("lr: 0.5", "lr: 0.001")
    (folder / "plan.yaml").write_text(plan + train)
    assert invoke(["compile", "model.py", "--plan", "plan.yaml", "-o", "build", "-q"]) == 0
    assert invoke(["train", "build", "--plan", "plan.yaml", "--in-process", "--metrics", "metrics.jsonl"]) == 0
    rows = [row for row in map(json.loads, Path("metrics.jsonl").read_text().splitlines()) if row["kind"] == "train"]
    before, after = (Checkpoint.open(folder / f"large.runs/step_0000000{step}") for step in (1, 2))
    (name,) = after.index.tensors
    change = before.read(name).astype(np.float64) - after.read(name)
    assert rows[1]["gradient_norm"] == pytest.approx(np.sqrt((change**2).sum()) / 0.001, rel=3e-6)
