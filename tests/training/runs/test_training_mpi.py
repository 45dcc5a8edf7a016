"""`partc train` over real MPI: what ranks in processes of their own learn under a plan is what one rank learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import training_models as models
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from rows import of_today
from training_equivalence import run, same_tensors, source_of

BATCH, STEPS = 6, 3
TRAIN = f"""train:
  loss: {{type: softmax_cross_entropy, logits: y, labels: labels}}
  optimizer: {{type: lamb, lr: 0.05, eps: 0.01}}
  clip: {{norm: 0.5}}
  bucket_mb: 0.001
  data: data.npz
  shuffle: false
  batch: {BATCH}
  steps: {STEPS}
"""
STAGES = """ranks: 4
placement: {layers.0: [0, 1], layers.1: [2, 3], layers.2: [2, 3]}
sharding: {layers.0: {in: [[2, 1]]}, layers.1: colwise, layers.2: rowwise}
symbols: {batch: {divisor: 2}}
"""
HEADS = """ranks: 3
sharding: {"layers.*.*.project": colwise, "layers.*.*.out": rowwise, tokens: {parameters: {weight: [3, 1]}}, head: colwise}
"""


@pytest.mark.parametrize(("name", "plan"), of_today([("mlp", STAGES), ("gpt", HEADS)], 1))
def test_ranks_learn_what_one_learns(name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = name == "gpt"
    one = models.gpt(width=24, layers=1, heads=6, vocabulary=36, context=8) if gpt else models.mlp(width=12, inputs=7)
    source = source_of(one)
    records = one.feeds(np.random.default_rng(1), batch=BATCH * STEPS, **({"seq": 5} if gpt else {}))
    np.savez(tmp_path / "data.npz", **records)
    ir.save(source.model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(plan + TRAIN)
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    steps = [{key: array[k * BATCH : (k + 1) * BATCH] for key, array in records.items()} for k in range(STEPS)]
    whole = run(source, f"ranks: 1\n{TRAIN}", tmp_path / "whole", steps)
    words = ["train", "build", "--plan", "plan.yaml", "--threads", "1", "--checkpoint", "kept", "--save", str(STEPS)]
    monkeypatch.chdir(tmp_path)
    assert invoke(words) == 0
    kept = Checkpoint.open(tmp_path / "kept")
    have = {tensor: kept.read(tensor) for tensor in kept.index.tensors}
    same_tensors(have, whole.after, whole.before, 5e-4)
