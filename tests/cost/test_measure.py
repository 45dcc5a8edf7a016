"""`partc measure` over MPI: the file is read, a simulation takes it, segments of an artifact are in it; and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import brief_ranks
import numpy as np
import pytest
from partc.cli.machine import measure
from partc.cli.machine.job import result_of_module
from partc.cli.main import invoke
from partc.compiler.cost.machine_file import machine_text, read_machine
from partc.compiler.cost.play import Compute
from partc.compiler.cost.step import simulated
from partc.compiler.ops.registry import entries
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.artifact.tensors.tensor import Tensor

SAMPLES = Path(__file__).parents[2] / "samples"


def by_brief_ranks(module: str, folder: Path, ranks: int) -> dict[str, Any]:
    """What the ranks find whose measurements are brief."""
    assert module == "partc.cli.machine.ranks"
    return result_of_module(brief_ranks.__name__, folder, ranks)


def test_a_measured_machine_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "result_of_module", by_brief_ranks)
    monkeypatch.setenv("PYTHONPATH", str(Path(brief_ranks.__file__).parent), prepend=os.pathsep)
    compile_model(SAMPLES / "gpt/model.py", SAMPLES / "gpt/plan.yaml", tmp_path / "build")
    out = tmp_path / "machine.yaml"
    sizes = ["--set", "batch=2", "--set", "seq=16"]
    assert invoke(["measure", "-o", str(out), "--of", str(tmp_path / "build"), *sizes]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}: 2 ranks on ")
    machine = read_machine(out)
    out.write_text(machine_text(machine))
    assert machine_text(read_machine(out)) == out.read_text()
    cpu, (link,) = machine.processors["cpu"], machine.links
    assert {*link.split} == {"ReduceScatter", "AllGather", "AllToAll"}
    assert link.split["AllGather"].points[-1][0] == link.all_reduce.points[-1][0] / 2, (
        "of whose result a rank gives half"
    )
    own = {"pack", "unfold", "vectors"}
    assert {*cpu.kernels} == {entry.work.kernel for entry in entries()} - {"product", "convolution"} | own
    assert {*cpu.products} == {"matmul", "batch", "few", "few_int4"}
    for name in ("few", "few_int4"):
        amounts = [amount for amount, _ in cpu.products[name].points]
        assert [round(amount / amounts[0], 1) for amount in amounts] == [1, 2, 5, 9], "rows"
    assert 0 < cpu.session < 0.1
    assert 0 < cpu.step < 0.1
    assert 0 < cpu.kernels["view"].least < 1e-4
    assert cpu.ranks == 2
    assert cpu.alone is not None, "and read again, so it is slower in nothing"
    assert 0 < cpu.alone.step <= cpu.step
    by_size = (curve for name, curve in cpu.kernels.items() if name != "view")
    by_operations = (curve for name, curve in cpu.products.items() if not name.startswith("few"))
    for curve in (*by_operations, *by_size, link.send, link.all_reduce, *link.split.values()):
        assert curve.points[0][1] < curve.points[-1][1] < 10
    artifact, shown = open_artifact(tmp_path / "build"), {"batch": 2, "seq": 16}
    by_segments = simulated(artifact, machine, shown).played
    assert len(machine.segments) >= 3
    named = {
        action.what
        for one in by_segments.classes
        for action in one.actions
        if isinstance(action, Compute) and action.modules
    }
    assert named
    assert by_segments.seconds > sum(machine.segments.values()) / 4
    other = simulated(artifact, machine, {"batch": 2, "seq": 24}).played
    assert other.seconds > 0, "of other sizes by the curves"


def test_segments_are_measured_on_ids_as_large_as_the_inputs() -> None:
    """What other ranks gather of ids are ids, not zeros, which are sorted and looked up faster."""
    from partc.cli.machine.segments import received

    ids = Tensor.of(np.array([3, 9, 5], np.int64), BY_NAME["int64"])
    made = received(ids, Tensor.empty(BY_NAME["int64"], (400,)))
    assert made is not None
    assert {*made.array()} == {*range(3, 10)}
    assert received(ids, Tensor.empty(BY_NAME["float"], (400,))) is None


def test_links_along_the_axes_of_a_mesh() -> None:
    (tp, dp) = measure.links_of(4, {"dp": 2, "tp": 2})
    assert (tp["name"], tp["stride"], tp["lists"]) == ("tp", 1, [[0, 1], [2, 3]])
    assert (dp["name"], dp["stride"], dp["lists"]) == ("dp", 2, [[0, 2], [1, 3]])


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["-n", "1"], "is not in the range x>=2"),
        (["--mesh", "dp"], "'dp' is not a mesh such as dp=2,tp=4"),
        (["--mesh", "dp=3"], "--mesh dp=3: has 3 ranks, and -n says 2"),
    ],
)
def test_what_is_refused(options: list[str], fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["measure", "-o", str(tmp_path / "machine.yaml"), *options]) == 2
    assert fact in capsys.readouterr().err
    assert not (tmp_path / "machine.yaml").exists()


def test_the_folder_of_the_file_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["measure", "-o", str(tmp_path / "none/machine.yaml")]) == 2
    assert "the folder" in capsys.readouterr().err
