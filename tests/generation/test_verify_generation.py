"""`partc verify` of a plan that generates: equal tokens, also over MPI; a decoder with other weights is found to differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import decoder
from onnx import numpy_helper
from partc.cli.comparison import verify_generation
from partc.cli.comparison.verdict import Case
from partc.cli.main import invoke
from partc.compiler.frontend import load
from partc.compiler.pipeline import compile_model

PLAN = """ranks: 2
mesh: {tp: 2}
sharding: {"layers.*.up": colwise, "layers.*.down": rowwise}
generate: {slots: 3, length: 64, chunk: 8}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    onnx.save(decoder(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path / "plan.yaml"


def test_tokens_are_equal_over_mpi(plan: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = plan.parent / "model.onnx"
    assert invoke(["verify", str(model), "--plan", str(plan), "--random", "5", "--json", "--mpi"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["equal"]
    assert len(found["compared"]) >= 6
    assert all(one["equal"] and one["shape"] == [16] for one in found["compared"])


def test_another_model_differs(plan: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    report = compile_model(model, plan, tmp_path / "build")
    case = Case(model, plan, report, {}, tmp_path, False, load(model))
    assert verify_generation.verdict(case, 1).passed
    other = onnx.load(model)
    weight = next(one for one in other.graph.initializer if one.name == "layers.1.o.weight")
    weight.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(weight), 1, 0), weight.name))
    onnx.save(other, tmp_path / "other.onnx")
    found = verify_generation.verdict(replace(case, model=tmp_path / "other.onnx"), 1)
    assert not found.passed
    assert sum(not row.passed for row in found.rows) > 2
