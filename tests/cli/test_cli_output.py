"""`--json`, `-q` and `-v`: one document on stdout whatever happens, nothing, or more; exit codes as ever. The plan is read first."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import model
from partc.cli.main import COMMANDS, LazyGroup, invoke
from partc.cli.output import console, progress
from partc.cli.output.failures import described
from partc.compiler.errors import CompileError, Problem
from partc.runtime.errors import UsageError, out_of_memory

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 3] x) => (float[batch, 2] y)
<float[3, 2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> {
    [a] h = Relu(x)
    [b] y = MatMul(h, w)
}"""
PLAN = "ranks: 2\nplacement: {a: 0, b: 1}\n"
TRAIN = (
    PLAN
    + """train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.1}
  metrics: [mse]
  batch: 4
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(model(TEXT), tmp_path / "net.onnx")
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "wrong.yaml").write_text("ranks: 2\nplacment: {a: 0}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert invoke([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("folder")
def test_documents(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = told(capsys, "compile", "net.onnx", "--plan", "plan.yaml")
    assert compiled["transfers"] == 2
    assert [rank["sent"] for rank in compiled["ranks"]] == ["12*batch", "8*batch"]
    assert compiled["communication"][0] == {
        "op": "Send",
        "value": "h",
        "ranks": [[0], [1]],
        "bytes": "12*batch",
        "cause": "read by b (plan.yaml:2 'b')",
    }
    assert told(capsys, "check")["ok"] is True
    ran = told(capsys, "run", "--in-process", "--random", "0", "--set", "batch=5", "--repeat", "3")
    assert (ran["outputs"][0]["name"], ran["outputs"][0]["shape"], len(ran["steps"])) == ("y", [5, 2], 3)
    verified = told(capsys, "verify", "net.onnx", "--plan", "plan.yaml")
    assert verified["equal"] is True
    assert verified["compared"][0]["equal"] is True


def test_an_evaluation_is_a_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0).standard_normal
    np.savez(folder / "d.npz", x=draw((8, 3), np.float32), t=draw((8, 2), np.float32))
    told(capsys, "compile", "net.onnx", "--plan", "train.yaml")
    found = told(capsys, "eval", "--data", "d.npz", "--in-process")
    assert set(found) == {"step", "checkpoint", "metrics"}
    assert found["metrics"]["loss"] == pytest.approx(found["metrics"]["mse"])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["compile", "net.onnx", "--plan", "wrong.yaml"], 2, "wrong.yaml:2: unknown key 'placment'"),
        (["compile", "none.onnx"], 2, "none.onnx"),
        (["run", "nowhere", "--in-process"], 1, "nowhere"),
        (["run", "--no-such-option"], 2, "No such option '--no-such-option'"),
    ],
)
def test_errors_are_documents(arguments: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error in told(capsys, *arguments, code=code)["error"]


@pytest.mark.usefixtures("folder")
def test_ranks_over_mpi_give_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["compile", "net.onnx", "--plan", "plan.yaml", "-q"]) == 0
    assert capfd.readouterr().out == ""
    assert invoke(["run", "--random", "0", "--set", "batch=3", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["outputs"][0]["shape"] == [3, 2]
    assert invoke(["run", "--json"]) == 2
    assert "'x'" in json.loads(capfd.readouterr().out)["error"]


@pytest.mark.usefixtures("folder")
def test_verbose_says_what_is_done_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["compile", "net.onnx", "--plan", "plan.yaml", "-v"]) == 0
    heard = capsys.readouterr()
    assert "build: 2 ranks" in heard.out
    named = [line.partition(":")[0] for line in heard.err.splitlines()]
    assert named[0] == "load"
    assert named[-1] == "check"
    assert {"shapes", "place", "shard", "localize", "lower"} <= set(named)
    assert invoke(["compile", "net.onnx", "--plan", "wrong.yaml", "-v"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_nothing_of_a_mode_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["compile", "net.onnx", "--json"]) == 0
    assert invoke(["compile", "net.onnx", "-q"]) == 0
    capsys.readouterr()
    assert invoke(["compile", "net.onnx"]) == 0
    heard = capsys.readouterr()
    assert "build: 1 rank" in heard.out
    assert heard.err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_them(name: str) -> None:
    command = LazyGroup().get_command(None, name)  # type: ignore[arg-type]
    words = {
        word for one in getattr(command, "commands", {"": command}).values() for p in one.params for word in p.opts
    }
    assert {"-q", "-v"} <= words
    assert ("--json" in words) == (name in (*console.WITH_JSON, "inspect", "ops", "simulate", "checkpoint"))


def test_numbers_that_json_has_not_are_texts() -> None:
    given = {"a": float("nan"), "b": (np.float32(1.5), np.int64(2), float("-inf")), "c": None, 3: True}
    assert json.dumps(console.plain(given)) == '{"a": "nan", "b": [1.5, 2, "-inf"], "c": null, "3": true}'


def test_the_plan_is_read_before_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of a model may take minutes: a misspelt key is told at once."""
    (folder / "model.py").write_text("open('ran', 'w').close()\nraise ValueError('it ran')\n")
    assert invoke(["compile", "model.py", "--plan", "wrong.yaml"]) == 2
    assert "unknown key 'placment'" in capsys.readouterr().err
    assert not (folder / "ran").exists()


def test_a_run_of_one_step_shows_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.0)
    for total in (1, 3):
        with progress.Progress(total) as shown:
            for step in range(total + 1):
                shown.reached(step)
    assert capsys.readouterr().err.splitlines() == ["step 0 of 3", "step 1 of 3", "step 2 of 3"]


def caused(cause: Exception, error: Exception) -> Exception:
    """The error as one that is raised from another."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "no memory is left"),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "no memory is left: OSError: [Errno 12] Cannot allocate memory",
        ),
        (ImportError("x.so: failed to map segment from shared object"), "no memory is left: ImportError: x.so: failed"),
        (RuntimeError("std::bad_alloc"), "no memory is left: RuntimeError: std::bad_alloc"),
        (
            RuntimeError("OpenBLAS error: Memory allocation still failed"),
            "no memory is left: RuntimeError: OpenBLAS error",
        ),
        (
            RuntimeError("memory allocation of 48 bytes failed"),
            "no memory is left: RuntimeError: memory allocation of 48",
        ),
        (RuntimeError("can't start new thread"), "no memory is left: RuntimeError: can't start new thread"),
        (
            caused(MemoryError("9 GB"), CompileError(Problem("m.onnx", "is not a valid ONNX model"))),
            "no memory is left: 9 GB",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the system refused: No space left on device\n  help: free space",
        ),
        (UsageError("the plan is out of memory, it says"), "the plan is out of memory, it says"),
    ],
)
def test_what_the_system_refuses_is_no_bug(error: Exception, text: str) -> None:
    code, told = described(error)
    assert code == (2 if isinstance(error, UsageError) else 1)
    assert told.startswith(text)
    assert "bug" not in told


def test_an_error_that_memory_only_preceded_is_told_itself() -> None:
    def parse() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise UsageError("the formula is too deep") from None

    with pytest.raises(UsageError) as caught:
        parse()
    assert described(caught.value) == (2, "the formula is too deep")


LOST = """
import os, signal, sys
from partc.cli import interruption
class Finalized:
    def __del__(self): os.kill(os.getpid(), signal.SIGTERM); [0 for _ in range(9)]
def in_a_finalizer(arguments):
    Finalized()
    signal.pause()
def in_a_library(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
    interruption.refuse_stopped()
class Native(interruption.ExtensionFileLoader):
    def create_module(self, spec):
        os.kill(os.getpid(), signal.SIGTERM)
        [0 for _ in range(9)]
        print("initialized", flush=True)
def in_a_native_module(arguments):
    Native("module", "module.so").create_module(None)
    signal.pause()
interruption.run(dict(finalizer=in_a_finalizer, library=in_a_library, module=in_a_native_module)[sys.argv.pop()])
"""


@pytest.mark.parametrize("where", ["finalizer", "library", "module"])
def test_a_signal_whose_exception_is_lost_ends_the_command(where: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LOST, where], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (143, "stopped by SIGTERM\n")
    assert ended.stdout == ("initialized\n" if where == "module" else "")


def test_a_closed_output_is_the_null_device() -> None:
    script = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-P', '-m', 'partc.cli', 'ops', 'Relu'])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_error_that_leads_to_itself_is_read_once() -> None:
    first, second = ValueError("first"), RuntimeError("std::bad_alloc")
    first.__context__, second.__context__ = second, first
    assert out_of_memory(first) is second
    second.args = ("second",)
    assert out_of_memory(first) is None
