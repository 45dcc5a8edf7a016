"""Changes of what is of an evaluation beside its training, each named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutated import correct, rewrite_raw, texts
from small_training import DATA_PARALLEL, PERCEPTRON, compiled


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sound") / "build", PERCEPTRON, DATA_PARALLEL)


def _corrected(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """The change, and hashes that fit."""

    def done(folder: Path) -> None:
        change(folder)
        correct(folder)

    return done


def _truncated(folder: Path) -> None:
    file = folder / "evaluate_rank_0000.onnx"
    file.write_bytes(file.read_bytes()[:-9])


def _evaluation(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A change of what the manifest says of the evaluation alone."""
    return lambda folder: rewrite_raw(folder, lambda data: change(data["programs"]["evaluate"]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_corrected(_truncated), "evaluate_rank_0000.onnx: it is not an ONNX file"),
        (_truncated, "evaluate_rank_0000.onnx: it has"),
        (
            _evaluation(lambda data: data["kept"].update(stranger="")),
            "manifest.json: program 'evaluate': it keeps 'stranger', which is not a state",
        ),
        (
            _evaluation(lambda data: data["kept"].update(shift="shift.next")),
            "program 'evaluate': 'shift.next' takes the place of the state 'shift'; 'train' alone replaces the state",
        ),
        (
            _evaluation(lambda data: data["kept"].update(shift=["", "shift.next"])),
            "program 'evaluate': 2 outputs take the place of the state 'shift', which has 1 records",
        ),
        (
            _evaluation(lambda data: data["kept"].pop("shift")),
            "evaluate_rank_0000.onnx: graph input 'shift': manifest.json lists no input",
        ),
        (
            _evaluation(lambda data: data["outputs"].pop()),
            "evaluate_rank_0000.onnx: graph output 'loss': manifest.json lists no output",
        ),
        (
            _evaluation(lambda data: data.update(rank_files=["rank_0000.onnx"] * 2)),
            "rank_0000.onnx: it is the program of ranks 0, and the manifest makes it that of ranks 0-1",
        ),
        (
            _evaluation(lambda data: data.update(rank_files=["../rank_0000.onnx"] * 2)),
            "programs.evaluate.rank_files: Value error, the path '../rank_0000.onnx' leaves the folder",
        ),
        (
            lambda folder: rewrite_raw(folder, lambda data: data["programs"]["train"]["kept"].pop("shift")),
            "manifest.json: the program 'train' does not keep the state 'shift'",
        ),
        (
            lambda folder: rewrite_raw(folder, lambda data: data.update(programs={})),
            "manifest.json: programs: Dictionary should have at least 1 item",
        ),
    ],
)
def test_a_changed_evaluation_is_named(
    sound: Path, tmp_path: Path, change: Callable[[Path], object], expected: str
) -> None:
    shutil.copytree(sound, tmp_path / "build")
    change(tmp_path / "build")
    found = texts(tmp_path / "build")
    assert expected in found, found
