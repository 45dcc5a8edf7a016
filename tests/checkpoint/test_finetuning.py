"""A Llama is fine-tuned as by transformers' Trainer under every plan, half of it resumed under another, and goes back as a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

from finetuning_case import FineTuning, largest  # noqa: E402


@pytest.mark.filterwarnings("ignore")
def test_a_fine_tuning_is_the_trainers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    case = FineTuning(tmp_path, steps=4)
    losses, weights, model = case.trainer()
    begun, half = case.partc("dp", 2)
    np.testing.assert_allclose(begun, losses[:2], atol=1e-5, rtol=0)
    assert largest(half, weights[2]) < 1e-5
    assert largest(half, weights[4]) > 1e-3
    for plan in ("tp", "1f1b"):
        rest, whole = case.partc(plan, 4, "dp")
        np.testing.assert_allclose(rest, losses[2:], atol=1e-5, rtol=0)
        assert largest(whole, weights[4]) < 1e-5
    words = ["--format", "hf", "--config", str(tmp_path / "llama"), "-o", str(tmp_path / "trained")]
    assert invoke(["checkpoint", "export", str(tmp_path / "tp.dp.runs"), *words]) == 0
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "trained").eval()
    ids = torch.from_numpy(case.ids[:5])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
