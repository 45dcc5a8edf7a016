"""The batch that a plan names is one that the symbols of the inputs allow: told by the compile, and by the checker of an artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutated import change_manifest
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.checker.check import check_artifact
from training_equivalence import from_text

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float[B, 4] y) <float[6, 4] w> { y = MatMul (x, w) }"""
PLAN = """ranks: 1
symbols: {B: {divisor: 16}}
train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.01}
  batch: %s
"""


def built(folder: Path, batch: int) -> Path:
    compile_source(from_text(MODEL, {"w": (6, 4)}), parse_plan(PLAN % batch, "plan.yaml"), folder / "build")
    return folder / "build"


def test_the_compile_refuses_a_batch_that_symbols_do_not_allow(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        built(tmp_path, 24)
    assert str(caught.value) == (
        "plan.yaml:3: the batch, 'B' of input 'x', is 24\n"
        "  'B' is 16*N with N at least 1, at least 16\n"
        "  help: 16 or 32 would do"
    )
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (24, "the batch, 'B' of input 'x', is 24"),
        ("32", "batch: expected an integer"),
        (0, "batch: expected at least 1"),
    ],
)
def test_the_check_refuses_it(batch: object, told: str, tmp_path: Path) -> None:
    folder = built(tmp_path, 32)
    assert check_artifact(folder) == []
    change_manifest(folder, lambda data: data["training"]["settings"].update(batch=batch))
    (violation,) = check_artifact(folder)
    assert told in str(violation)
