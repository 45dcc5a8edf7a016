"""Moving averages of the parameters: the unsharded model's under every plan, in checkpoints, evaluations and exports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.runtime.checkpoint.checkpoint import Checkpoint
from safetensors.numpy import load_file
from training_command_case import ONE, PARALLEL, PLACED, built, folder, train

__all__ = ["folder"]

EMA = "  ema: {decay: 0.75, evaluate: true}\n  test: data.npz\n"
ZERO = PARALLEL.replace("lr: 0.01}", "lr: 0.01, shard: dp}")
TENSOR = ONE.replace("ranks: 1", "ranks: 2\nsharding: {a: colwise, b: rowwise}")
STAGES = PLACED.replace("train:", "pipeline: {microbatches: 2, schedule: 1f1b}\ntrain:", 1)


def averages(path: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(path)
    return {one.parameter: checkpoint.read(name) for name, one in checkpoint.index.tensors.items() if one.kind == "ema"}


def optimizer_bytes(build: str, capsys: pytest.CaptureFixture[str]) -> int:
    """What `partc inspect` says that rank 0 keeps beside the parameters."""
    capsys.readouterr()
    assert invoke(["inspect", build, "--json", "--set", "batch=12"]) == 0
    return int(json.loads(capsys.readouterr().out)["memory"][0]["targets"][0]["optimizer"])


def test_they_are_the_unsharded_models_under_every_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(built(folder, ONE + EMA, "one"))
    assert train(one, "--checkpoint", "one.runs", "--save", "1", "--steps", "10", "--metrics", "m.jsonl") == 0
    at = [Checkpoint.open(folder / f"one.runs/step_{step:08}") for step in range(1, 11)]
    last = averages(at[-1].path)
    assert sorted(last) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    for name in last:
        whole = averages(at[0].path)[name]  # 0.75 of the first values and 0.25 of those after step 1
        for checkpoint in at[1:]:
            whole = whole + (checkpoint.read(name) - whole) * 0.25
        np.testing.assert_allclose(last[name], whole, rtol=1e-6, atol=1e-7)
        assert abs(last[name] - at[-1].read(name)).max() > 1e-3
    for name, plan in {"zero": ZERO, "tp": TENSOR, "1f1b": STAGES}.items():
        other = str(built(folder, plan + EMA, name))
        begun = ["--resume", "one.runs/step_00000004"] if name in ("tp", "1f1b") else []
        assert train(other, "--checkpoint", f"{name}.runs", "--steps", "10", *begun) == 0
        found = averages(folder / f"{name}.runs")
        for tensor in last:
            np.testing.assert_allclose(found[tensor], last[tensor], atol=2e-6, err_msg=f"{name} {tensor}")
    said = {}
    for words in ([], ["--ema"]):
        capsys.readouterr()
        plan = ["eval", "tp", "--plan", "tp.yaml", "--in-process", "--json", "--checkpoint", "one.runs"]
        assert invoke([*plan, *words]) == 0
        said[bool(words)] = json.loads(capsys.readouterr().out)["metrics"]["loss"]
        assert invoke(["checkpoint", "export", "tp.runs", "-o", "w.safetensors", *words]) == 0
        exported = load_file(folder / "w.safetensors")
        assert sorted(exported) == sorted(last)
        same = all(np.allclose(exported[tensor], last[tensor], atol=2e-6) for tensor in last)
        assert same == bool(words)
    assert invoke(["verify", "model.py", "--plan", "tp.yaml"]) == 0
    assert optimizer_bytes("tp", capsys) == optimizer_bytes(str(built(folder, TENSOR, "bare")), capsys) + 4 * (
        96 + 48 + 8 + 6
    )
    tested = [row for row in map(json.loads, (folder / "m.jsonl").read_text().splitlines()) if row["kind"] == "test"]
    assert tested[-1]["loss"] == pytest.approx(said[True], abs=1e-5)
    assert said[False] != pytest.approx(said[True], abs=1e-3)
    plain = str(built(folder, ONE, "plain"))
    assert train(plain, "--resume", "one.runs", "--checkpoint", "plain.runs", "--steps", "11") == 0, "goes on without"
    assert averages(folder / "plain.runs") == {}
    capsys.readouterr()
    assert invoke(["checkpoint", "export", "plain.runs", "-o", "w.safetensors", "--ema"]) == 1
    assert "has no moving averages" in capsys.readouterr().err
