"""Nothing that comes with an artifact runs or is written to by itself: neither beside it, nor what its manifest names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from artifact_edit import chain
from mutated import change_manifest, correct
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime import ArtifactError, UsageError, load_trainer

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RUNS = "open('RAN', 'a').write(__file__)\nraise ImportError('stopped here')\n"


def test_ranks_import_nothing_from_the_folder_where_they_start(tmp_path: Path) -> None:
    chain(tmp_path)
    np.savez(tmp_path / "x.npz", x=np.zeros((8, 5), np.float32), index=np.array([4, 1]))
    for name in ("click", "numpy", "mpi4py", "onnxruntime"):
        (tmp_path / f"{name}.py").write_text(RUNS)
    words = [sys.executable, "-m", "partc.cli", "run", ".", "--input", "x.npz", "--threads", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **AS_ROOT}, timeout=60
    )
    assert not (tmp_path / "RAN").exists()
    assert done.returncode == 0, done.stderr


MODEL = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 3] y) <float[6, 3] w = {}> {{ [one] y = MatMul(x, w) }}"""
PLAN = """
ranks: 1
train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.1}
  schedule: {type: python, function: "rates.py:rate"}
  data: {source: records.py, transform: "records.py:same"}
  test: data.npz
  checkpoint: {folder: runs}
  batch: 4
  steps: 2
"""
RECORDS = """
import pathlib
import numpy as np
import beside
pathlib.Path("RAN").touch()
source = type("S", (), {"__len__": lambda s: 8, "__getitem__": lambda s, at: beside.records(len(at))})()
def same(batch): return batch
"""
BESIDE = """
import numpy as np
def records(n): return {"x": np.ones((n, 6), np.float32), "t": np.ones((n, 3), np.float32)}
"""
NAMES = (
    "train: schedule: `rate` of {0}/rates.py, which would run",
    "train: data: `source` of {0}/records.py, which would run",
    "train: data: transform: `same` of {0}/records.py, which would run",
    "train: test: {0}/data.npz, which would be read",
    "train: checkpoint: {0}/runs, which would be written",
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user: a plan with code, data and checkpoints, and beside it what was compiled; the commands run elsewhere."""
    folder = tmp_path / "mine"
    folder.mkdir()
    numbers = ", ".join(["0.5"] * 18)
    onnx.save(onnx.parser.parse_model(MODEL.format(f"{{{numbers}}}")), folder / "model.onnx")
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "rates.py").write_text("import pathlib\npathlib.Path('RAN').touch()\ndef rate(step): return 0.01\n")
    (folder / "records.py").write_text(RECORDS)
    (folder / "beside.py").write_text(BESIDE)
    np.savez(folder / "data.npz", x=np.ones((4, 6), np.float32), t=np.ones((4, 3), np.float32))
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_what_a_manifest_names_counts_only_with_the_plan(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = str(mine / "build")
    assert invoke(["train", build]) == 2
    told = capsys.readouterr().err
    assert [line.strip() for line in told.splitlines()[1:-1]] == [name.format(mine) for name in NAMES]
    assert told.splitlines()[-1] == (
        "  help: if the plan is yours, use --plan plan.yaml, or --data DATA, --test DATA, --checkpoint DIR; "
        "--trust-code allows all that the artifact names"
    )
    assert invoke(["eval", build]) == 2
    assert "data.npz, which would be read" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"rates\.py, which would run\n  help: give `rate`, or `trust_code=True`"):
        load_trainer(build)
    assert not Path("RAN").exists()
    assert not (mine / "runs").exists()
    data = str(mine / "data.npz")
    assert invoke(["eval", build, "--data", data, "--batch", "4"]) == 0
    load_trainer(build, rate=lambda step: 0.1).close()
    assert not Path("RAN").exists()
    assert invoke(["train", build, "--plan", str(mine / "plan.yaml")]) == 0
    assert (mine / "runs" / "step_00000002").is_dir()
    assert Path("RAN").exists()
    assert invoke(["eval", build, "--plan", str(mine / "plan.yaml")]) == 0
    assert invoke(["train", build, "--trust-code"]) == 0
    load_trainer(build, trust_code=True).close()


def test_an_artifact_that_says_other_things_than_the_plan_is_refused(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hostile(manifest: dict[str, Any]) -> None:
        manifest["training"]["settings"]["checkpoint"]["folder"] = "../../precious"
        manifest["training"]["settings"]["data"]["transform"] = "setup.py:run"

    change_manifest(mine / "build", hostile)
    assert invoke(["train", str(mine / "build"), "--plan", str(mine / "plan.yaml")]) == 2
    told = capsys.readouterr().err
    assert "its `data` is" in told
    assert "its `checkpoint` is" in told
    assert "compiled with" in told
    assert not Path("RAN").exists()


def test_check_lists_what_is_named_and_refuses_code_inside(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = mine / "build"
    assert invoke(["check", str(build)]) == 0
    shown = capsys.readouterr().out
    assert [f"used only with --plan or --trust-code: {name.format(mine)}" in shown for name in NAMES] == [True] * 5
    (build / "rates.py").write_text("def rate(step): return 0.1")
    change_manifest(build, lambda manifest: manifest["training"].update(folder="."))
    change_manifest(build, lambda manifest: manifest["files"].update({"rates.py": {"bytes": 0, "sha256": ""}}))
    correct(build)
    assert invoke(["check", str(build)]) == 1
    assert "an artifact holds no code" in capsys.readouterr().err
    change_manifest(build, lambda manifest: manifest.update(rank_files=["../other.onnx"]), "evaluate")
    with pytest.raises(ArtifactError, match=r"the path '\.\./other\.onnx' leaves the folder"):
        load_trainer(build, rate=lambda step: 0.1)


def test_nothing_is_unpickled() -> None:
    """No file of the product lets numpy or torch make objects of what it reads.

    `.metadata` of torch.distributed.checkpoint is a pickle: one file reads it, by an unpickler that makes what it lists and nothing else
    (`tests/checkpoint/test_interchange.py` tries another)."""
    top = Path(__file__).parents[2]
    product = [path for part in ("cli", "compiler", "runtime") for path in (top / part).rglob("*.py")]
    told = {path.name: path.read_text() for path in product}
    assert len(told) > 100
    by_list = {"import pickle": ["dcp_folder.py"]}
    for word in (
        "allow_pickle=True",
        "weights_only=False",
        "import pickle",
        "pickle.load",
        "import marshal",
        "import shelve",
    ):
        assert [name for name, text in told.items() if word in text] == by_list.get(word, []), word
    loads = [call for text in told.values() for call in re.findall(r"torch(?:_module\(\))?\.load\((.*)\)", text)]
    assert loads
    assert [call for call in loads if "weights_only=True" not in call] == []
