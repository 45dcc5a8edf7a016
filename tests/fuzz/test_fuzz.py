"""A few seconds of every kind of fuzzing; any number of minutes by `python tests/fuzz/plans.py --minutes N --seed S`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "plans": 24,
    "schema_plans": 12,
    "models": 16,
    "manifests": 14,
    "rank_files": 10,
    "checkpoints": 7,
    "bombs": 10,
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_given_ends_well(name: str) -> None:
    path = Path(__file__).parent / f"{name}.py"
    asked = [sys.executable, str(path), "--cases", str(CASES[name]), "--seed", "7"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(rf"{CASES[name]} cases: (\d+ ok, )?\d+ refused", ended.stdout)


def test_each_number_of_microbatches_is_checked() -> None:
    asked = [sys.executable, str(Path(__file__).parent / "microbatch_numbers.py"), "5", "45"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^\d+ changes: (\d+ harmless, )?\d+ refused$", ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.parametrize("name", ["random_pipelines", "random_targets"])
def test_random_trainings_are_as_the_whole(name: str) -> None:
    path = Path(__file__).parent / f"{name}.py"
    asked = [sys.executable, str(path), "--cases", "4", "--seed", "3"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^4 cases: [2-4] ok", ended.stdout, re.MULTILINE), ended.stdout


def test_random_trainings_are_as_those_of_torch() -> None:
    pytest.importorskip("torch", reason="random_torch.py compares with torch")
    path = Path(__file__).parent / "random_torch.py"
    asked = [sys.executable, str(path), "--cases", "3", "--seed", "3"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^3 cases: [23] ok", ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.parametrize(
    ("seed", "case"),
    [
        (21, 27),  # a rank hands on, within a task, what the stage's own ranks read again
        (31, 183),  # auto splits the backward passes of some microbatches
        (77, 13),  # the number of positions that a loss is divided by was that of one microbatch
        (31, 402),  # the gradient of a loss is once a step, and no forward op to repeat
    ],
)
def test_random_pipelines_that_were_wrong(seed: int, case: int) -> None:
    path = Path(__file__).parent / "random_pipelines.py"
    asked = [sys.executable, str(path), "--case", str(case), "--seed", str(seed)]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
