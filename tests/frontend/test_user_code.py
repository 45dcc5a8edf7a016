"""Errors of the user's own Python while data are read and a model trains: told by its file, line, records and rank, on one rank or all."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from partc.cli.main import invoke
from partc.compiler.frontend.user_code import importable
from partc.compiler.pipeline import compile_model
from partc.runtime.data.code import Code, Transform
from partc.runtime.data.sources.user_source import user_source
from partc.runtime.user_code import UserCodeError, run_file, user_code

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 3] y) <float[6, 3] w> { [one] y = MatMul(x, w) }"""
PLAN = """
ranks: 2
symbols: {batch: {divisor: 2}}
dataset: data_parallel
train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}, batch: 4, steps: 40}
"""
RECORDS = """
import os, sys
import numpy as np
class source:
    calls = 0
    def __len__(self): return 16
    def __getitem__(self, at):
        source.calls += 1
        if source.calls > 6:
            FAIL
        return {"x": np.ones((len(at), 6), np.float32), "t": np.ones((len(at), 3), np.float32)}
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = onnx.parser.parse_model(MODEL)
    del model.graph.value_info[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 3), np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(PLAN)
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "build"


def test_what_ends_one_rank_ends_all(build: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fail = 'if os.environ.get("OMPI_COMM_WORLD_RANK", "1") == "1": sys.exit(3)'
    file = build.parent / "records.py"
    file.write_text(RECORDS.replace("FAIL", fail))
    assert invoke(["train", "build", "--threads", "1", "--data", "records.py"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"{file}:10: it ends the process: SystemExit(3)"
    assert lines[1].startswith("  while reading records ")
    assert lines[2].endswith(" on rank 1")
    assert lines[3:] == [f'  File "{file}", line 10, in __getitem__', f"    {fail}"]


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        ("1 / 0", "records.py:10: ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", "records.py:10: KeyboardInterrupt"),
        ("return {'x': np.ones((len(at), 6), np.float32)}", "records.py: it returns no 't', records "),
        ("return 3", "records.py: it returns a int, not a dict of arrays, records "),
    ],
)
def test_all_ranks_fail_alike(build: Path, capfd: pytest.CaptureFixture[str], fail: str, told: str) -> None:
    (build.parent / "records.py").write_text(RECORDS.replace("FAIL", fail))
    assert invoke(["train", "build", "--threads", "1", "--data", "records.py", "--in-process"]) in (1, 2)
    error = capfd.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert "bug in partc" not in error


def test_functions_and_objects_that_do_not_tell(tmp_path: Path) -> None:
    """A transform without a signature, which is taken; a source whose attributes raise."""
    (tmp_path / "t.py").write_text(
        "same = dict\nclass Odd:\n    def __getattr__(self, name): return 1 / 0\nsource = Odd()\n"
    )
    transform = Transform.load(f"{tmp_path / 't.py'}:same", Code())
    assert transform({"x": np.ones(3)}, 3, None)["x"].shape == (3,)
    with pytest.raises(UserCodeError, match=r"t\.py:3: ZeroDivisionError"):
        user_source(Code().value(tmp_path / "t.py", "source"), "t.py", None, 0)


def test_long_and_chained_errors() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        try:
            raise KeyError("x")
        except KeyError as error:
            raise ValueError("no x") from error

    with pytest.raises(UserCodeError) as caught, user_code("file.py", "reading record 7"):
        deep(50)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("ValueError: no x")
    assert lines[1] == "  while reading record 7"
    assert "  ... 40 calls more" in lines
    assert lines[-1].startswith("  after KeyError: 'x' at ")
    assert len(lines) < 30
    closing = GeneratorExit()
    with pytest.raises(GeneratorExit), user_code("file.py"):
        raise closing


def test_files_of_two_folders_import_their_own_modules(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sizes.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "records.py").write_text("from sizes import NAME as found")
    assert [Code().value(tmp_path / name / "records.py", "found") for name in ("one", "two", "one")] == [
        "one",
        "two",
        "one",
    ]


def test_threads_that_run_files_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What importlib forgets, the module path and the known modules are the process's: two at once delete the same entry."""
    inside: list[int] = []
    together: list[int] = []

    def slow() -> None:
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    def model() -> None:
        with importable(tmp_path):
            pass

    (tmp_path / "near.py").write_text("NAME = 'near'")
    (tmp_path / "records.py").write_text("import near\nfound = near.NAME")
    monkeypatch.setattr(importlib, "invalidate_caches", slow)
    before = list(sys.path)
    made: list[object] = []
    jobs = [lambda: made.append(run_file(tmp_path / "records.py").found), model] * 4
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (together, made, sys.path) == ([1] * 8, ["near"] * 4, before)


COUNTING = """
import threading
from pathlib import Path
import numpy as np
count, generator = 0, np.random.default_rng(3)
with Path(__file__).with_name("ran.txt").open("a") as out:
    out.write(threading.current_thread().name + "\\n")
def count_up(batch):
    global count
    count += 1
    return {"x": batch["x"] * count + generator.normal(size=batch["x"].shape).astype("f"), "t": batch["t"]}
def rate(step):
    global count
    count += 1
    return 0.1 / count
"""


def test_in_one_process_files_run_before_the_ranks_and_each_has_its_own_globals(build: Path) -> None:
    """A transform that counts its calls, or draws from a generator of its file, gives the numbers that it gives over MPI."""
    tmp_path = build.parent
    np.savez("data.npz", x=np.ones((24, 6), np.float32), t=np.ones((24, 3), np.float32))
    (tmp_path / "counting.py").write_text(COUNTING)
    plan = PLAN.replace("ranks: 2", "ranks: 4").replace("divisor: 2", "divisor: 4").replace("batch: 4", "batch: 8")
    plan = plan.replace("train: {", "train: {schedule: {type: python, function: counting.py:rate}, ")
    plan = plan.replace("steps: 40", "steps: 6, data: {source: data.npz, transform: counting.py:count_up}")
    (tmp_path / "plan.yaml").write_text(plan)
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "four")
    found = []
    for number in range(3):
        name = f"{number}.jsonl"
        words = ["train", "four", "--plan", "plan.yaml", "--in-process", "--metrics", name, "-q"]
        assert invoke(words) == 0
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        found.append([(row["step"], row["loss"], row["lr"]) for row in rows if "loss" in row])
        ran = (tmp_path / "ran.txt").read_text().splitlines()
        assert ran == ["MainThread"] * 8 * (
            number + 1
        )  # for each of four ranks once for its data and once for its rate
    assert found[0] == found[1] == found[2]
    assert found[0][-1][2] == pytest.approx(0.1 / 6)
