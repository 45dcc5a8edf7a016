"""Inputs that hold no records, as a temperature or a number of turns: one value for all, from the plan, the command line or a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer, UsageError
from partc.runtime.artifact.training.data_spec import Spec, data_of_words
from partc.runtime.data.loader import open_loader
from trainer_case import on_all
from training_equivalence import from_text

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x, float t, float[1] s, int64 turns) => (float[batch, 4] y) <float[6, 4] w> {
    a = MatMul (x, w)
    b = Div (a, t)
    c = Mul (b, s)
    y = Loop (turns, "", c) <body = turn (int64 i, bool on, float[batch, 4] v) => (bool more, float[batch, 4] u) {
        more = Identity (on)
        u = Tanh (v) }>
}"""
TRAIN = """train:
  loss: {type: mean_squared, prediction: y, target: label}
  optimizer: {type: sgd, lr: 0.5}
  accumulate: 2
"""
PLANS = {"alone": (1, "ranks: 1\n"), "dealt": (2, "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 4}}\n")}


@pytest.mark.parametrize("plan", PLANS)
def test_one_value_for_all_records(plan: str, tmp_path: Path) -> None:
    ranks, text = PLANS[plan]
    made = compile_source(from_text(TEXT, {"w": (6, 4)}), parse_plan(text + TRAIN, "plan.yaml"), tmp_path / "build")
    assert made.manifest.training is not None
    assert made.manifest.training.fixed == ["t", "s", "turns"]
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=x, label=label, t=np.float32(2.0), s=np.ones(1, np.float32) * 3, turns=np.array(2))
    np.savez(tmp_path / "records.npz", x=x, label=label)
    np.save(tmp_path / "s.npy", np.array(3.0))
    specs = [
        Spec.of(data_of_words(["all.npz"], tmp_path), "--data"),
        Spec.of(data_of_words(["records.npz", "t=2", "s=s.npy", "turns=2"], tmp_path), "--data"),
        Spec.parse({"source": "records.npz", "t": 2.0, "s": [3], "turns": 2}, tmp_path),
    ]

    def act(trainer: Trainer) -> list[float]:
        losses = []
        for spec in specs:
            loader = open_loader(spec, trainer.ports, trainer.rank, 8, shuffle=False, fixed=trainer.record.fixed)
            with loader:
                trainer.step = 0
                batch = next(loader)
                trainer.load(tmp_path / "kept") if (tmp_path / "kept").exists() else trainer.save(tmp_path / "kept")
                losses.append(float(np.asarray(trainer.train(batch).get("loss", 0.0))))
        return losses

    losses = on_all(tmp_path / "build", ranks, act)[0]
    w = next(value.const_value for value in from_text(TEXT, {"w": (6, 4)}).model.graph.initializers.values())
    assert w is not None
    want = float(np.square(np.tanh(np.tanh(x @ w.numpy() / 2 * 3)) - label).mean())
    assert losses == pytest.approx([want] * 3, rel=1e-6)
    with pytest.raises(UsageError) as found:
        open_loader(
            Spec.of(data_of_words(["records.npz", "turns=0.5"], tmp_path), "--data"),
            made.manifest.inputs,
            0,
            8,
            fixed=["t", "turns"],
        )
    told = str(found.value)
    assert (
        "input 't': it holds no records but one value for all, and none is given\n  help: write data: {t: 0.5}" in told
    )
    assert "input 'turns': 0.5 is given, and the model takes tensor(int64) []" in told
