"""The callbacks for Weights & Biases: one run of a job with all numbers of its log, by a stand-in for `wandb`; JSON lines without it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from samples_training_case import SAMPLES

WANDB = """
import json, os
class Run:
    def __init__(self): self.summary = Summary()
    def log(self, numbers, step): note("log", step, numbers)
class Summary:
    def __setitem__(self, key, value): note("summary", key, value)
def note(*row):
    with open("noted", "a") as file:
        file.write(json.dumps(row) + "\\n")
def init(project):
    note("init", project, os.getpid())
    return Run()
"""
PLAN = """ranks: 2
placement: {conv1: 0, conv2: 0, fc1: 1, fc2: 1, fc3: 1}
train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: label, ignore_index: 10}
  optimizer: {type: momentum, lr: 0.01, momentum: 0.9}
  metrics: [accuracy, confusion]
  data: data.npz
  test: nothing.npz
  batch: 16
  steps: 4
  log: 2
  evaluate: 4
  report: [parameter_norm]
  callbacks: wandb_log.py
  checkpoint: {folder: runs, every: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The LeNet with the callbacks, 64 random records, and a test set of labels that do not count."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 1, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, label=rng.integers(0, 10, 64))
    np.savez(tmp_path / "nothing.npz", x=x[:16], label=np.full(16, 10))
    for name in ("model.py", "wandb_log.py"):
        shutil.copy(SAMPLES / "lenet" / name, tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    compile_model(tmp_path / "model.py", tmp_path / "plan.yaml", tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return tmp_path


def logged(rows: list[tuple[int, dict[str, Any]]], lines: list[dict[str, Any]]) -> None:
    """Each row has the numbers of the line of the log with its step: of steps, then of the evaluation."""
    train = [row for row in rows if "train/loss" in row[1]]
    assert [step for step, _ in train] == [2, 4]
    for (step, row), line in zip(train, [one for one in lines if one["kind"] == "train"], strict=True):
        assert row.keys() == {f"train/{name}" for name in line if name not in ("kind", "step")}
        assert {name: row[f"train/{name}"] for name in ("loss", "accuracy", "parameter_norm", "lr")} == {
            name: line[name] for name in ("loss", "accuracy", "parameter_norm", "lr")
        }, step
        assert row["train/confusion"] == pytest.approx(row["train/accuracy"])


def test_a_job_is_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over MPI: rank 0 alone begins it, at the first line of the log."""
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
    monkeypatch.setenv("WANDB_PROJECT", "digits")
    assert invoke(["train", "--plan", "plan.yaml", "--metrics", "m.jsonl"]) == 0
    noted = [json.loads(line) for line in (folder / "noted").read_text().splitlines()]
    assert [row[:2] for row in noted] == [
        ["init", "digits"],
        ["log", 2],
        ["log", 4],
        ["log", 4],
        ["summary", "checkpoint"],
    ]
    assert noted[4][2].endswith("step_00000004")
    logged([(row[1], row[2]) for row in noted if row[0] == "log"], read(folder / "m.jsonl"))


def test_without_it_there_are_lines_of_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is undefined is null there."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert invoke(["train", "--plan", "plan.yaml", "--in-process", "--threads", "1", "--metrics", "m.jsonl"]) == 0
    rows = read(folder / "wandb_log.jsonl")
    assert [row["_step"] for row in rows] == [2, 4, 4, 4]
    assert rows[2] == {"_step": 4, "test/loss": None, "test/accuracy": None, "test/confusion": None}
    assert rows[3]["checkpoint"].endswith("step_00000004")
    logged([(row.pop("_step"), row) for row in rows], read(folder / "m.jsonl"))


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in file.read_text().splitlines()]
