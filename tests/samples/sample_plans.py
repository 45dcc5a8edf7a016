"""The plans of all samples, and the models that they are of."""

from __future__ import annotations

from pathlib import Path

import pytest
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import Artifact, open_artifact

SAMPLES = Path(__file__).parents[2] / "samples"
MODELS = {
    **{f"fine_tuning/{name}": f"{name}.py" for name in ("distillation", "frozen_tower", "lora", "two_losses")},
    "fine_tuning/ema": "two_losses.py",
    "gpt/generate": "decoder.py",
    "lenet/place_calls": "place_calls.py",
    "resnet/plan": "make_model.py",
    "shard_function/plan": "net1.py",
    "two_stage/train_pipeline": "batch.py",
}
"""The model of a plan, where it is not `model.py`."""
PLANS = sorted(str(path.relative_to(SAMPLES).with_suffix("")) for path in SAMPLES.glob("*/*.yaml"))


def compiled(plan: str, out: Path) -> Artifact:
    """The artifact of a sample's plan, in the folder `out`; that a compile of it proves its files, other tests of the samples show."""
    if plan.startswith("fine_tuning"):
        pytest.importorskip("torch", reason="its models are torch modules")
    path = SAMPLES / f"{plan}.yaml"
    compile_model(path.with_name(MODELS.get(plan, "model.py")), path, out, check=False)
    return open_artifact(out)
