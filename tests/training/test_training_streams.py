"""`partc train` on a `DataLoader` and on streams: over MPI and in one process, stopped and resumed under other plans."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.runtime.checkpoint.checkpoint import Checkpoint
from streams_case import PLANS, SOURCES, prepared
from training_command_case import AS_ROOT, command, folder, tensors, train

__all__ = ["folder"]

pytest.importorskip("torch", reason="torch is not installed: a DataLoader is torch's")


def assert_alike(have: Path, want: Path) -> None:
    one, other = (Checkpoint.open(folder / "step_00000020") for folder in (have, want))
    assert one.index.tensors.keys() == other.index.tensors.keys()
    for name in other.index.tensors:
        np.testing.assert_allclose(one.read(name), other.read(name), rtol=1e-4, atol=1e-5, err_msg=f"{have}: {name}")


@pytest.mark.parametrize("source", SOURCES)
def test_every_plan_trains_on_the_same_batches(folder: Path, source: str) -> None:
    prepared(folder, SOURCES[source])
    for name in PLANS:
        assert train(name, "--checkpoint", f"kept_{name}", "--save", "20") == 0
        assert_alike(folder / f"kept_{name}", folder / "kept_one")


@pytest.mark.parametrize("source", ["loader", "stream"])
def test_stopped_anywhere_it_goes_on_under_any_plan(
    folder: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(folder, SOURCES[source])
    assert train("one", "--checkpoint", "whole", "--save", "20") == 0
    for steps, name in zip(("3", "5", "7", "11", "14", "20"), (*PLANS, "one"), strict=True):
        capsys.readouterr()
        resume = ["--resume"] if steps != "3" else []
        assert train(name, "--checkpoint", "kept", "--steps", steps, *resume) == 0
        said = capsys.readouterr().out
        again = "skips its first" in said
        assert again == (source == "stream" and steps not in ("3", "7")), said
    assert_alike(folder / "kept", folder / "whole")


def over_mpi(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **AS_ROOT}
    return subprocess.run(
        command(*words, "--threads", "1"), capture_output=True, text=True, env=environment, timeout=120, check=False
    )


@pytest.mark.parametrize(("source", "plan"), [("loader", "parallel"), ("stream", "middle")])
def test_over_mpi_stopped_and_resumed_it_ends_in_the_same_bits(folder: Path, source: str, plan: str) -> None:
    prepared(folder, SOURCES[source])
    words = [plan, "--plan", f"{plan}.yaml"]
    whole = over_mpi(*words, "--checkpoint", "whole")
    assert whole.returncode == 0, whole.stderr
    for steps in ("8", "20"):
        part = over_mpi(*words, "--checkpoint", "kept", "--steps", steps, "--resume", "auto")
        assert part.returncode == 0, part.stderr
    assert tensors(folder / "kept") == tensors(folder / "whole")
    assert invoke(["train", "one", "--plan", "one.yaml", "--threads", "1", "--checkpoint", "kept_one"]) == 0
    assert_alike(folder / "whole", folder / "kept_one")
