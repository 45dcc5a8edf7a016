"""Trains the samples with fewer steps, from a copy of their folder, and compares what was learned."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the samples, without what was made in them."""
    folder = tmp_path_factory.mktemp("copy") / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("build*", "resnet18.*", "__pycache__"))
    return folder


@dataclass(frozen=True)
class Trained:
    """What a training told of its steps and of evaluation, and its tensors, whole, after the last step."""

    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    tensors: dict[str, np.ndarray]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


def train(folder: Path, plan: str, out: Path, *options: str, mpi: bool = False, model: str = "model.py") -> Trained:
    """Compiles a sample's model by one of its plans, and trains."""
    compile_model(folder / model, folder / plan, out / "build")
    kept, told = out / "checkpoints", out / "metrics.jsonl"
    command = [
        "train",
        str(out / "build"),
        "--plan",
        str(folder / plan),
        "--threads",
        "1",
        "--checkpoint",
        str(kept),
        "--metrics",
        str(told),
        *options,
    ]
    assert invoke([*command, *["--in-process"] * (not mpi)]) == 0
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    checkpoint = Checkpoint.open(kept)
    return Trained(
        [line for line in lines if line["kind"] == "train"],
        [line for line in lines if line["kind"] == "test"],
        {name: checkpoint.read(name) for name in checkpoint.index.tensors},
    )


def same(have: Trained, want: Trained, *, rtol: float, atol: float) -> None:
    """Equal in every step and in every tensor, those of the optimizer too; `atol` is a share of a tensor's largest element."""
    np.testing.assert_allclose(have.losses, want.losses, rtol=rtol)
    assert have.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        np.testing.assert_allclose(
            have.tensors[name], tensor, rtol=rtol, atol=atol * float(np.abs(tensor).max()), err_msg=name
        )


def with_few_tables(folder: Path) -> Path:
    """Wide & deep in the folder, with 6 of its 26 tables, so that it compiles soon."""
    shutil.copytree(SAMPLES / "wide_deep", folder, ignore=shutil.ignore_patterns("build*", "__pycache__"))
    text = (folder / "model.py").read_text()
    few, count = re.subn(
        r"^SIZES = .*\nSIZES \+= .*$", "SIZES = [1460, 584, 12000, 304, 4, 28]", text, flags=re.MULTILINE
    )
    assert count == 1
    (folder / "model.py").write_text(few)
    return folder
