"""With `--ops` a trace has onnxruntime's own times of ops within the segments that ran them, and nothing else changes."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from mutation_kinds import KINDS, WEIGHTS, Kind, build
from partc.cli.job import training
from partc.cli.main import invoke
from partc.compiler.cost.traced import read_traced
from partc.runtime.artifact.trace import CATEGORIES, COMPUTE, OP, STEP, Span, read_trace
from partc.runtime.devices.devices import HOST
from partc.runtime.errors import UsageError
from partc.runtime.execution.times.profiler import SessionRuns
from partc.runtime.program.ort import new_session

STEPS, MICROBATCHES = 5, 4
OPS = ("--ops", "--trace-steps", f"1:{STEPS}")
WRITTEN = 2e-9
"""Times are written to a nanosecond."""
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two ranks, whose microbatches share sessions."""
    found = tmp_path_factory.mktemp("ops")
    build(KINDS["pipeline"], found / "build")
    rng = np.random.default_rng(1)
    np.savez(found / "data.npz", x=rng.normal(size=(16, 6)).astype(np.float32), label=rng.integers(0, 5, 16))
    return found


def train(folder: Path, *given: str) -> int:
    data = ["--data", str(folder / "data.npz"), "--batch", "8", "--steps", str(STEPS), "--threads", "1", "-q"]
    return invoke(["train", str(folder / "build"), "--in-process", *data, *given])


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    file = folder / "a.trace.json"
    assert train(folder, "--profile", str(file), *OPS) == 0
    return file


def by_segment(trace: Path) -> list[tuple[Span, list[Span]]]:
    """Each computation with the ops that stand behind it in the file, which are its own."""
    found: list[tuple[Span, list[Span]]] = []
    segment: Span | None = None
    for one in read_trace(trace).spans:
        if one.category == OP:
            assert segment is not None
            found[-1][1].append(one)
        elif one.category == COMPUTE:
            segment = one
            found.append((one, []))
        else:
            segment = None
    return found


def test_ops_lie_within_the_segment_that_ran_them(trace: Path) -> None:
    for segment, ops in by_segment(trace):
        assert ops, f"{segment.name} of step {segment.about['step']} has none"
        for one in ops:
            assert (one.rank, one.lane, one.about["step"]) == (segment.rank, segment.lane, segment.about["step"])
            assert one.begin >= segment.begin - WRITTEN
            assert one.begin + one.seconds <= segment.begin + segment.seconds + WRITTEN
        assert sum(one.seconds for one in ops) <= segment.seconds + len(ops) * WRITTEN


def test_every_microbatch_of_every_step_has_the_ops_of_its_modules(trace: Path) -> None:
    seen: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    for segment, ops in by_segment(trace):
        if str(segment.about.get("task", "")).startswith(("0F", "1F")):
            for one in ops:
                seen[one.about["module"]][one.about["step"], segment.about["task"]] += 1
    calls = {(step, k) for step in range(1, STEPS + 1) for k in range(MICROBATCHES)}
    # MatMul, Add and Tanh of the first stage are one kernel, which has the name of the MatMul
    assert {*seen} & {"up", "shift", "act"} == {"up"}
    assert {*seen["up"]} == {(step, f"0F{k}") for step, k in calls}
    assert {*seen["down"]} >= {(step, f"1F{k}") for step, k in calls}
    assert {*seen["up"].values()} == {1}


@pytest.mark.parametrize("fails", [False, True])
def test_no_file_of_onnxruntime_is_left(
    folder: Path, tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a folder while it runs, also where the training ends with an error."""
    place, seen = tmp_path / "temporary", list[str]()
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def write(path: str, ranks: Sequence[str], quiet: bool) -> None:
        seen.extend(one.name for one in place.glob("partc-ops-*/*"))
        if fails:
            raise UsageError("the disk is full")

    monkeypatch.setattr(training, "write_profile", write)
    assert train(folder, "--profile", str(tmp_path / "c.trace.json"), *OPS) == (2 if fails else 0)
    assert {name.partition(".")[0] for name in seen} >= {"rank0"}
    assert not any(place.iterdir())


def test_a_run_of_ranks_that_cut_modules_has_ops_too(tmp_path: Path) -> None:
    build(KINDS["sharded"], tmp_path / "build")
    file = tmp_path / "d.trace.json"
    given = ["--random", "7", "--set", "n=8", "--repeat", "3", "--profile", str(file), "--ops", "-q"]
    assert invoke(["run", str(tmp_path / "build"), "--in-process", *given]) == 0
    found = by_segment(file)
    assert {(segment.rank, segment.about["step"]) for segment, ops in found if ops} == {
        (rank, step) for rank in range(3) for step in (1, 2, 3)
    }
    assert {one.about["module"] for _, ops in found for one in ops} >= {"up", "down"}


def test_an_op_without_a_name_stands_after_the_op_before_it(tmp_path: Path) -> None:
    """onnxruntime names a fused Add and Gelu `BiasGelu`, however many there are."""
    text = """g (float[n, 3, 6] x) => (float[n, 3, 5] y) {
        [up] h = MatMul(x, v) [shift] s = Add(h, b) [act] t = Gelu(s)
        [down] d = MatMul(t, w) [last] e = Add(d, c) [end] y = Gelu(e) }"""
    plan = "ranks: 2\nplacement: {up: 0, shift: 0, act: 0, down: 0, last: 0, end: 1}\n"
    build(Kind(text, WEIGHTS, plan, {"x": (4, 3, 6)}, {}), tmp_path / "build")
    file = tmp_path / "e.trace.json"
    given = ["--random", "7", "--set", "n=4", "--profile", str(file), "--ops", "-q"]
    assert invoke(["run", str(tmp_path / "build"), "--in-process", *given]) == 0
    found = [(one.rank, one.about["op"], one.about["module"]) for _, ops in by_segment(file) for one in ops]
    assert found == [
        (0, "MatMul", "up"),
        (0, "BiasGelu", "after up"),
        (0, "MatMul", "down"),
        (0, "Add", "last"),
        (1, "Gelu", "end"),
    ]


def test_an_op_has_the_time_of_what_is_inside_of_it(tmp_path: Path) -> None:
    """Else the times of ops would be more than those of their segment."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]> g (float[64, 64] x, bool c) => (float[64, 64] y) {
            a = Exp(x)
            b = If (c) <then_branch = t () => (float[64, 64] p) { q = MatMul(a, x) p = Tanh(q) },
                        else_branch = e () => (float[64, 64] r) { r = Sin(a) }>
            y = Sqrt(b) }""")
    session = new_session(model.SerializeToString(), 1, HOST, {}, profile=str(tmp_path / "if"))
    for _ in range(3):
        session.run(["y"], {"x": np.ones((64, 64), np.float32), "c": np.array(True)})
    runs = SessionRuns().of(session)
    assert [[one.op for one in run.nodes] for run in runs] == [["Exp", "If", "Sqrt"]] * 3
    assert all(sum(one.seconds for one in run.nodes) <= run.seconds for run in runs)
    assert SessionRuns().of(session) == []  # it was measured until then


def test_what_reads_a_trace_takes_ops_for_no_actions(trace: Path, tmp_path: Path) -> None:
    without = tmp_path / "without.trace.json"
    lines = trace.read_text().splitlines()
    without.write_text("\n".join(line for line in lines if f'"cat": "{OP}"' not in line) + "\n")
    own, plain = read_traced(trace), read_traced(without)
    assert (own.spans, own.rest, own.step) == (plain.spans, plain.rest, plain.step)


def test_the_command_prints_the_slowest_ops(trace: Path, capsys: Capture) -> None:
    assert invoke(["profile", str(trace), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profiled"] == "onnxruntime"
    rows = document["ops"]
    assert next(row["calls"] for row in rows if (row["op"], row["module"]) == ("FusedGemm", "up")) == MICROBATCHES
    assert [row["time"] for row in rows] == sorted((row["time"] for row in rows), reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1
    assert invoke(["profile", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "onnxruntime was profiled, which slows the steps" in text
    assert "slowest ops (all ranks)" in text


def test_without_the_option_there_are_no_ops(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "b.trace.json"
    assert train(folder, "--profile", str(file)) == 0
    assert {one.category for one in read_trace(file).spans} <= {STEP, "data", *CATEGORIES}
    assert invoke(["profile", str(file)]) == 0
    text = capsys.readouterr().out
    assert "slowest ops" not in text
    assert "was profiled" not in text


@pytest.mark.parametrize(
    ("given", "help"),
    [
        ((), "give --profile x.trace.json, too"),
        (("--profile", "x.json"), "give --profile x.trace.json, too"),
        (("--profile", "x.trace.json"), "choose early steps, such as --trace-steps 4:13"),
    ],
)
def test_ops_without_a_trace_or_of_any_number_of_steps_are_refused(
    folder: Path, given: tuple[str, ...], help: str, capsys: Capture
) -> None:
    assert train(folder, "--ops", *given) == 2
    assert help in capsys.readouterr().err
