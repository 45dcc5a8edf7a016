"""A Llama is fine-tuned as by transformers' Trainer under two plans a day, half of it resumed under another, and goes back as a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from rows import of_today

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

from finetuning_case import PLANS, FineTuning, largest  # noqa: E402


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", of_today(["tp", "1f1b"], 1))
def test_a_fine_tuning_is_the_trainers(tmp_path: Path, plan: str) -> None:
    from transformers import LlamaForCausalLM

    case = FineTuning(tmp_path, steps=4, plans={name: PLANS[name] for name in ("dp", plan)})
    losses, weights, model = case.trainer()
    begun, half = case.partc("dp", 2)
    np.testing.assert_allclose(begun, losses[:2], atol=1e-5, rtol=0)
    assert largest(half, weights[2]) < 1e-5
    assert largest(half, weights[4]) > 1e-3
    rest, whole = case.partc(plan, 4, "dp")
    np.testing.assert_allclose(rest, losses[2:], atol=1e-5, rtol=0)
    assert largest(whole, weights[4]) < 1e-5
    words = ["--format", "hf", "--config", str(tmp_path / "llama"), "-o", str(tmp_path / "trained")]
    assert invoke(["checkpoint", "export", str(tmp_path / f"{plan}.dp.runs"), *words]) == 0
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "trained").eval()
    ids = torch.from_numpy(case.ids[:5])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
