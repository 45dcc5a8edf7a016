"""`partc inspect` knows the size of every value of every sample: a peak leaves nothing out."""

from __future__ import annotations

from pathlib import Path

import pytest
from partc.cli.output.stats import typical_sizes
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.execution.memory.needed import rank_memory

SAMPLES = Path(__file__).parents[2] / "samples"
MODELS = {
    **{f"fine_tuning/{name}": f"{name}.py" for name in ("distillation", "frozen_tower", "lora", "two_losses")},
    "fine_tuning/ema": "two_losses.py",
    "lenet/place_calls": "place_calls.py",
    "resnet/plan": "make_model.py",
    "shard_function/plan": "net1.py",
    "two_stage/train_pipeline": "batch.py",
}
"""The model of a plan, where it is not `model.py`."""
PLANS = sorted(str(path.relative_to(SAMPLES).with_suffix("")) for path in SAMPLES.glob("*/*.yaml"))


@pytest.mark.parametrize("plan", PLANS)
def test_no_value_of_a_sample_is_left_out(plan: str, tmp_path: Path) -> None:
    if plan.startswith("fine_tuning"):
        pytest.importorskip("torch", reason="its models are torch modules")
    path = SAMPLES / f"{plan}.yaml"
    compile_model(path.with_name(MODELS.get(plan, "model.py")), path, tmp_path / "build")
    artifact = open_artifact(tmp_path / "build")
    sizes = typical_sizes(artifact.manifest)
    for program in artifact.programs:
        beside = artifact if program == artifact.programs[0] else artifact.beside(program)
        needed = [rank_memory(beside, rank, sizes) for rank in range(artifact.manifest.ranks)]
        assert {rank: one.unknown for rank, one in enumerate(needed) if one.unknown} == {}
        assert all(one.peak > 0 for one in needed)
