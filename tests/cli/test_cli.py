"""The commands: what they print, what they write, and their exit codes, called in this process without MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from artifact_edit import chain, chain_reference
from onnx import TensorProto, helper
from partc.cli import main as entry
from partc.cli.interruption import takes_steps
from partc.cli.main import COMMANDS, invoke
from partc.runtime.artifact.manifest import open_artifact


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return chain(tmp_path / "build")


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, np.ndarray]:
    """Inputs of the chain, saved as in.npz and one by one."""
    x = np.random.default_rng(11).normal(size=(6, 5)).astype(np.float32)
    arrays = {"x": x, "index": np.array([4, 1])}
    np.savez(tmp_path / "in.npz", x=x, index=arrays["index"])
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return arrays


def test_help_names_every_command_without_importing_any() -> None:
    code = "import sys; from partc.cli.main import invoke; invoke(['--help']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in out for name in COMMANDS)
    loaded = out.splitlines()[-1]
    for heavy in ("numpy", "onnx", "onnx_ir", "pydantic", "rich", "mpi4py", "partc.cli.commands.run"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([name, "--help"]) == 0
    assert f"\n  partc {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out == f"partc {version('partc')}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["nothing"], 2, "No such command 'nothing'"),
        (["run", "--nothing"], 2, "No such option"),
        (["run", "missing"], 1, "missing: there is no such folder\n  help: "),
        (["run", "build", "-n", "5"], 2, "build: compiled for 3 ranks, not 5; run it with -n 3\n"),
        (["run", "build", "--random", "1", "--set", "batch"], 2, "'batch' is not NAME=SIZE"),
        (["run", "build", "--random", "1", "--set", "batch=65"], 2, "--set batch=65: it must be at most 64"),
        (
            ["run", "build", "--random", "1", "--set", "bath=3"],
            2,
            "--set bath=3: no such symbol; the symbols are 'batch'",
        ),
        (["run", "build", "--set", "batch=3"], 2, "--set is the size of random inputs: add --random SEED"),
        (["run", "build"], 2, "input 'x' (tensor(float) [batch, 5]) has no value"),
        (["run", "build", "--input", "none.npz"], 2, "none.npz: there is no such file"),
        (["run", "build", "--input", "x=none.npy"], 2, "none.npy: there is no such file, for input 'x'"),
        (["run", "build", "--input", "x.npy"], 2, "x.npy: name its input, as in x="),
        (["run", "build", "--input", "text.npz"], 2, "text.npz: not a valid .npz file"),
        (["run", "build", "--input", "in.npz", "--input", "z=x.npy"], 2, "'z' is not an input of the model"),
        (["run", "build", "--input", "in.npz", "--input", "x=x.npy"], 2, "input 'x' is already read from"),
        (["run", "build", "--input", "in.npz", "-o", "no/out.npz"], 2, "does not exist"),
        (["inspect", "build", "--rank", "3"], 2, "build: there is no rank 3; the ranks are 0 to 2"),
        (["inspect", "build", "--node", "fcc*"], 2, "'fcc*' matches no node"),
        (["check", "missing"], 1, "missing: there is no such folder"),
        (["compile", "model.txt"], 2, "model.txt"),
        (["verify", "missing.onnx"], 2, "missing.onnx"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    build: Path,
    inputs: dict[str, np.ndarray],
    arguments: list[str],
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(build.parent)
    Path("text.npz").write_text("text")
    if "-n" in arguments:
        arguments = [*arguments, "--random", "1"]
    assert invoke(arguments) == code
    told = capsys.readouterr()
    assert expected in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_a_fault_of_partc_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(entry.partc, "invoke", broken)
    assert invoke(["check"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: inside" in err
    assert err.endswith("partc: this is a bug in partc; please report it with the text above\n")


def test_the_pass_of_an_unexpected_fault_is_in_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from partc.compiler import pipeline

    def shard(program: pipeline.Program) -> pipeline.Program:
        raise KeyError("lost")

    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    onnx.save(proto, tmp_path / "model.onnx")
    monkeypatch.setattr(pipeline, "PASSES", (pipeline.normalize, shard, pipeline.lower))
    assert invoke(["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "build")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "partc: this is a bug in partc, in the pass 'shard'; please report it with the text above"


def test_an_interrupt_ends_with_130_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    takes_steps(lambda: 0)  # of a training before, which an interrupt has ended

    def interrupted(*arguments: object, **named: object) -> None:
        raise click.Abort

    monkeypatch.setattr(entry.partc, "invoke", interrupted)
    assert invoke(["check"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_check_says_what_it_proved_and_what_is_wrong(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["check", str(build)]) == 0
    assert capsys.readouterr().out == f"{build}: ok, 3 ranks, 7 files, 11 nodes, 3 transfers\n"
    (build / "rank_0001.onnx").write_bytes(b"short")
    assert invoke(["check", str(build)]) == 1
    told = capsys.readouterr()
    assert "rank_0001.onnx: it has 5 bytes; the manifest says" in told.err
    assert told.err.endswith("build: 1 violation\n")


RANKS = """\
rank  nodes  segments  weights  peak memory  received    sent  bytes in and out
   0      1         1    140 B                   32 B   196 B  in 32, out 28*batch
   1      2         2     84 B                  196 B    84 B  in 28*batch, out 12*batch
   2      2         1     48 B                   84 B    32 B  in 12*batch, out 32
"""
TRANSFERS = """\
transfers
from  to  value  type               bytes  at this size  cause
   0   1  h0     float[batch, 7]  28*batch         196 B  placement
   1   2  h1     float[batch, 3]  12*batch          84 B  placement
   2   0  y      float[2, 4]            32          32 B  placement
"""


def test_inspect_shows_ranks_and_transfers(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["inspect", str(build), "--set", "batch=7"]) == 0
    out = capsys.readouterr().out
    at = out.index("peak memory")
    shown = [line.split() for line in out.splitlines()]
    ranks, transfers = ([line.split() for line in text.splitlines()] for text in (RANKS, TRANSFERS))
    without_peak = [line[:at] + line[at + len("peak memory") :] for line in out.splitlines()]
    assert ranks[1:] == [line.split() for line in without_peak[1:4]]
    assert transfers == shown[(begin := shown.index(["transfers"])) : begin + 5]
    assert "sizes are for batch=7" in out


def test_inspect_gives_the_same_to_machines(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["inspect", str(build), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sizes"] == {"batch": 64}
    assert [rank["weights"] for rank in told["ranks"]] == [140, 84, 48]
    for rank in told["memory"]:
        (target,) = rank["targets"]
        step = sum(target[part] for part in ("weights", "inputs_outputs", "between", "inside", "messages", "sessions"))
        assert (rank["peak"], target["peak"], target["unknown"]) == (step, step, 0)
    # h0 and the result of the first of two products, and h1, which is sent from where it is made
    assert (told["memory"][1]["segments"], told["memory"][1]["targets"][0]["between"]) == (2, 2560)
    assert told["ranks"][1]["sent"] == {"text": "12*batch", "bytes": 768, "unknown": 0}
    assert [transfer["value"] for transfer in told["transfers"]] == ["h0", "h1", "y"]


def test_inspect_says_where_a_node_runs_and_why(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["inspect", str(build), "--node", "fc[1-2]"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "1", "MatMul", "fc1", "h1", "float[batch,", "3]", "plan.yaml:3"] in rows
    assert [
        "2",
        "0",
        "Recv",
        "from",
        "1",
        "fc1",
        "h1",
        "float[batch,",
        "3]",
        *["fc1", "is", "placed", "elsewhere"],
    ] in rows
    assert not any("fc0" in row for row in rows if "MatMul" in row)


def test_run_in_process_writes_all_outputs_and_the_same_bytes(
    build: Path, inputs: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build.parent
    for out in ("one.npz", "two.npz"):
        arguments = ["--in-process", "--input", str(folder / "in.npz"), "-o", str(folder / out), "--repeat", "3"]
        assert invoke(["run", str(build), *arguments]) == 0
    told = capsys.readouterr().out
    assert f"wrote {folder / 'one.npz'}: 2 arrays" in told
    assert "then 2 steps: median" in told
    assert (folder / "one.npz").read_bytes() == (folder / "two.npz").read_bytes()
    with np.load(folder / "one.npz") as found:
        for name, array in chain_reference(inputs["x"], inputs["index"]).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


def test_run_tells_the_outputs_where_no_file_is_wanted(
    build: Path, inputs: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build.parent
    given = ["--input", f"x={folder / 'x.npy'}", "--input", f"index={folder / 'index.npy'}"]
    assert invoke(["run", str(build), "--in-process", *given]) == 0
    out = capsys.readouterr().out.splitlines()
    y = chain_reference(inputs["x"], inputs["index"])["y"]
    best = " ".join(map(str, y.argmax(axis=1)))
    assert out[0].split() == ["output", "dtype", "shape", "min", "mean", "max", "argmax"]
    assert out[1].startswith("y       float32  [2, 4]")
    assert out[1].endswith(f"  {best}")
    assert f"{y.min():.4g}"[:5] in out[1]


def test_a_refused_batch_is_told_in_process_too(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(build.parent / "big.npz", x=np.zeros((65, 5), np.float32), index=np.array([0, 1]))
    assert invoke(["run", str(build), "--in-process", "--input", str(build.parent / "big.npz")]) == 2
    assert "'batch'" in capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two layers in an .onnx file, with a dynamic batch."""
    random = np.random.default_rng(5)
    weights = {"w1": random.normal(size=(5, 7)), "w2": random.normal(size=(7, 3))}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="up"),
        helper.make_node("Relu", ["h"], ["r"], name="act"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="down"),
    ]
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(made, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 3\nplacement:\n  up: 1\n  down: 2\n")
    return tmp_path / "model.onnx"


def test_compile_check_verify_and_run_a_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    assert invoke(["compile", "model.onnx", "--plan", "plan.yaml", "-o", "made"]) == 0
    told = capsys.readouterr().out
    assert "28*batch" in told
    assert "made: 3 ranks, 2 transfers" in told
    for line in told.splitlines():
        if line.startswith("dumps: "):
            assert all(Path(file.strip()).is_file() for file in line.removeprefix("dumps: ").split(","))
            break
    else:
        raise AssertionError("no word of the dumps")
    assert invoke(["check", "made"]) == 0
    assert invoke(["verify", "model.onnx", "--plan", "plan.yaml", "--set", "batch=7"]) == 0
    told = capsys.readouterr().out
    assert "model.onnx: 1 output on 3 ranks equal to the unsharded model's" in told
    assert "[7, 3]" in told
    assert invoke(["run", "made", "--in-process", "--random", "3", "--set", "batch=9"]) == 0
    assert "[9, 3]" in capsys.readouterr().out


def test_verify_fails_where_an_output_differs(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from partc.cli.comparison import verify_inference

    monkeypatch.chdir(model.parent)
    right = verify_inference.run_unsharded

    def wrong(*arguments: object) -> dict[str, np.ndarray]:
        outputs = right(*arguments)  # type: ignore[arg-type]
        outputs["y"][3, 1] += 0.5
        return outputs

    monkeypatch.setattr(verify_inference, "run_unsharded", wrong)
    assert invoke(["verify", "model.onnx", "--plan", "plan.yaml", "--set", "batch=7"]) == 1
    told = capsys.readouterr()
    assert "NOT EQUAL" in told.out
    assert "[3, 1]" in told.out
    assert "not equal: y" in told.err


def test_compile_keeps_a_folder_that_is_no_artifact(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("dear")
    assert invoke(["compile", "model.onnx", "-o", "mine"]) == 2
    assert "mine" in capsys.readouterr().err
    assert Path("mine/letter.txt").read_text() == "dear"


def test_plan_writes_a_plan_that_compiles(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    assert invoke(["plan", "model.onnx", "-o", "start.yaml"]) == 0
    assert invoke(["plan", "model.onnx", "-o", "start.yaml"]) == 2
    assert "start.yaml: the file exists already" in capsys.readouterr().err
    assert "up" in Path("start.yaml").read_text()
    assert invoke(["compile", "model.onnx", "--plan", "start.yaml", "-o", "started"]) == 0
    assert open_artifact("started").manifest.ranks >= 1


def test_schema_is_a_json_schema_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "ranks" in schema["properties"]
