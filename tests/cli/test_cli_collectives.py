"""The commands on an artifact with collectives and cut inputs and outputs: run, check, inspect, and its table of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from partc.cli.main import invoke

GRAPH = """rank (float[n, 2] x, float[2] bias) => (float[n, 2] y, float[2] total) <float[2] part, int64[1] axis = {0}>
{ y = Add(x, bias)
  part = ReduceSum <keepdims = 0> (x, axis)
  total = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (part) }"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows cut over 3 ranks."""
    boxes = [[[rank, rank + 1, 3], [0, 1, 1]] for rank in range(3)]
    cut = {"x": (["rows", 2], boxes), "y": (["rows", 2], boxes)}
    return write(tmp_path / "build", [GRAPH] * 3, groups={"all": [[0, 1, 2]]}, boxes=cut)


Answer = tuple[int, str, str]
"""Exit code, stdout and stderr."""
Partc = Callable[..., Answer]


@pytest.fixture
def partc(capfd: pytest.CaptureFixture[str]) -> Partc:
    """A command in this process, and what its ranks say in theirs."""

    def run(*arguments: object) -> Answer:
        capfd.readouterr()
        code = invoke([*map(str, arguments)])
        told = capfd.readouterr()
        return code, told.out, told.err

    return run


@pytest.mark.parametrize(
    ("how", "packed"),
    [("in process", True), ("in process", False), ("MPI", False)],
    ids=["npz-in process", "npy-in process", "npy-MPI"],
)
def test_run_cuts_inputs_and_joins_outputs(
    folder: Path, tmp_path: Path, how: str, packed: bool, partc: Partc, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, bias = np.arange(30, dtype=np.float32).reshape(15, 2), np.array([3, 5], np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "bias.npy", bias)
    np.savez(tmp_path / "both.npz", x=x, bias=bias)
    separate = ["--input", f"x={tmp_path / 'x.npy'}", "--input", f"bias={tmp_path / 'bias.npy'}"]
    given = ["--input", tmp_path / "both.npz"] if packed else separate
    asked = ("run", folder, *given, "-o", tmp_path / "y.npz")
    monkeypatch.setenv("PARTC_SHARED_MEMORY", "0")
    code, _, told = partc(*asked, *["--in-process"] * (how != "MPI"))
    assert code == 0, told
    assert "share no memory" not in told, "a run says it with -v alone"
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_array_equal(found["y"], x + bias)
        np.testing.assert_array_equal(found["total"], x.sum(0))


def test_run_refuses_what_cannot_be_cut(folder: Path, tmp_path: Path, partc: Partc) -> None:
    np.savez(tmp_path / "both.npz", x=np.zeros((14, 2), np.float32), bias=np.zeros(2, np.float32))
    code, _, told = partc("run", folder, "--input", tmp_path / "both.npz", "--in-process")
    assert code == 2
    assert "input 'x' axis 0 in all is 14, and it is sharded into 3\n  help: give a multiple of 3" in told


def test_check_and_inspect_show_collectives(folder: Path, partc: Partc) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["programs"]["infer"]["collectives"][0] |= {"bytes": "8", "cause": "the rows of x are cut"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "3 ranks, 2 files, 9 nodes, 0 transfers, 1 collective" in partc("check", folder)[1]
    text = partc("inspect", folder)[1]
    assert "AllReduce  0-2    total  float[2]" in text
    assert "the rows of x are cut" in text
    assert "AllReduce with 0,2" in partc("inspect", folder, "--rank", 1)[1]
    found = json.loads(partc("inspect", folder, "--json")[1])
    assert found["collectives"][0]["op"] == "AllReduce"
    assert [(one["sent"]["text"], one["received"]["text"]) for one in found["ranks"]] == [("8", "8")] * 3


def test_a_verbose_run_says_that_ranks_share_no_memory(
    folder: Path, tmp_path: Path, partc: Partc, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given.npz"
    np.savez(given, x=np.ones((6, 2), np.float32), bias=np.ones(2, np.float32))
    told = "ranks of one host share no memory and use MPI: rank 0: PARTC_SHARED_MEMORY=0\n"
    monkeypatch.setenv("PARTC_SHARED_MEMORY", "0")
    code, _, err = partc("run", folder, "--input", given, "-v")
    assert (code, err.count(told)) == (0, 1), err
    assert "partc.cli.job JOB\n" in err
    assert '"reporting": ' in partc("run", folder, "--input", given, "-vv")[2]
