"""A small model and plans for the commands of training, in a folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiled_once import compiled_once
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.newest import latest

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MODEL = """
from partc.compiler import Input, Symbol, nn
nn.seed(3)
batch = Symbol()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 6)
        self.drop = nn.Dropout(0.25)
    def forward(self, op, x):
        return self.b(op, self.drop(op, op.Tanh(self.a(op, x))))
model = Net()
inputs = {"x": Input([batch, 12], "float32")}
outputs = ["y"]
"""
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.01}
  metrics: [accuracy]
  data: data.npz
  batch: 12
  epochs: 4
  log: 5
"""
PLACED = "ranks: 2\nplacement: {a: 0, b: 1}\n" + TRAIN
PARALLEL = "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n" + TRAIN
ONE = "ranks: 1\n" + TRAIN


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 12)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, label=(x[:, :6].argmax(1)).astype(np.int64))
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def built(folder: Path, plan: str, name: str = "build") -> Path:
    (folder / f"{name}.yaml").write_text(plan)

    def compile_into(out: Path) -> None:
        compile_model(folder / "model.py", folder / f"{name}.yaml", out)

    return compiled_once(folder / name, ("command", (folder / "model.py").read_text(), plan, name), compile_into)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "partc.cli", "train", *words]


def tensors(folder: Path) -> dict[str, bytes]:
    found = latest(folder)
    assert found is not None
    checkpoint = Checkpoint.open(found)
    return {name: checkpoint.read(name).tobytes() for name in checkpoint.index.tensors}


def train(build: str, *options: str) -> int:
    """The exit code of a training on ranks in this process, by its own plan."""
    return invoke(["train", build, "--plan", f"{build}.yaml", "--in-process", "--threads", "1", *options])


def run(build: Path, *words: str) -> tuple[int, str]:
    """The exit code of a training under MPI, and what it says of its restarts."""
    done = subprocess.run(
        command(str(build), "--plan", f"{build}.yaml", "--threads", "1", *words),
        capture_output=True,
        text=True,
        env={**os.environ, **AS_ROOT},
    )
    return done.returncode, done.stderr
