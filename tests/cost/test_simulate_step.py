"""`partc simulate` with a machine: closed forms of a step, plans, classes of alike ranks, a trace, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machines import machine, shared
from partc.cli.main import invoke
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.machine_file import machine_text
from partc.compiler.cost.step import simulated
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import Artifact, open_artifact

Capture = pytest.CaptureFixture[str]
MODEL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 64] x) => (float[batch, 16] y) <float[64, 128] w, float[128, 16] v> {
    [up] a = MatMul (x, w)
    [bend] b = Relu (a)
    [down] y = MatMul (b, v)
}"""
TENSOR = """ranks: 2
symbols: {batch: {min: 1}}
sharding: {up: colwise, down: rowwise}
"""
STAGES = """ranks: 2
symbols: {batch: {min: 1}}
placement: {up: 0, down: 1}
outputs: {y: 1}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import numpy as np
    import onnx

    proto = onnx.parser.parse_model(MODEL)
    for one, shape in (("w", (64, 128)), ("v", (128, 16))):
        values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, one))
    del proto.graph.input[1:]
    onnx.save(proto, tmp_path / "model.onnx")
    (tmp_path / "machine.yaml").write_text(machine_text(machine()))
    return tmp_path / "model.onnx"


def built(model: Path, plan: str, name: str = "build") -> Path:
    folder = model.parent
    (folder / f"{name}.yaml").write_text(plan)
    compile_model(model, folder / f"{name}.yaml", folder / name)
    return folder / name


def told(capsys: Capture, *arguments: str) -> dict[str, Any]:
    """The document of a simulation."""
    capsys.readouterr()
    assert invoke(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert invoke(["simulate", *arguments]) == 2
    return capsys.readouterr().err


def test_a_rank_without_others_on_its_host_has_its_memory_alone(model: Path) -> None:
    """On the machine whose ranks are twice as fast alone: by how many a plan has on a host, not by how many cores there are."""
    on = shared(machine(cores=2))
    one, two = (open_artifact(built(model, plan, name)) for plan, name in (("ranks: 1\n", "one"), (TENSOR, "two")))

    def busy(artifact: Artifact, on: Machine, hosts: int = 1) -> float:
        return max(simulated(artifact, on, {"batch": 512}, hosts).played.busy) - 105e-6

    whole, half = busy(one, machine(cores=2)), busy(two, machine(cores=2))
    assert busy(one, on) == pytest.approx(whole / 2)
    assert busy(two, on) == pytest.approx(half)
    assert busy(two, on, hosts=2) == pytest.approx(half / 2)


def test_a_cut_product_is_its_operations_and_one_sum(model: Path, capsys: Capture) -> None:
    """1000 records: two products on each rank, a Relu of what it has, and the sum over both, by the speeds of the machine."""
    folder = built(model, TENSOR)
    found = told(capsys, str(folder), "--machine", str(model.parent / "machine.yaml"), "--set", "batch=1000")
    operations = 2 * 1000 * 64 * 64 + 1000 * 64 + 2 * 1000 * 64 * 16
    assert [row["operations"] for row in found["ranks"]] == [operations + 1000 * 64] * len(found["ranks"])
    assert {(one["operations"], one["bytes"]) for one in found["files"].values()} == {("10368*batch", "64*batch")}
    products = 2 * 1000 * 64 * (64 + 16) / 1e9
    relu = 2 * 1000 * 64 * 4 / 1e9
    reduced = 20e-6 + (4 * 1000 * 16 / 1e9 - 20e-6)
    beside = 100e-6 + 20e-6 + 5e-6
    assert found["seconds"] == pytest.approx(beside + products + relu + reduced, rel=0.03)
    assert found["ranks"][0]["bytes"] == 4 * 1000 * 16
    assert found["critical"][0]["name"] == "up"


def test_a_message_of_a_placed_model(model: Path, capsys: Capture) -> None:
    """The second rank waits for the first, and for what this sends."""
    folder = built(model, STAGES)
    found = told(capsys, str(folder), "--machine", str(model.parent / "machine.yaml"), "--set", "batch=1000")
    first, second = found["ranks"]
    assert (first["bytes"], second["bytes"]) == (4 * 1000 * 128, 0)
    assert [row["ranks"] for row in found["ranks"]] == ["0", "1"]
    message = machine().links[0].send(4 * 1000 * 128)
    assert first["under_way"] == pytest.approx(message + 20e-6, rel=0.03)
    assert found["seconds"] == pytest.approx(20e-6 + first["compute"] + message + second["compute"] - 100e-6, rel=0.03)
    assert [one["rank"] for one in found["path"]] == sorted(one["rank"] for one in found["path"])
    assert sum(one["seconds"] for one in found["path"]) == pytest.approx(found["seconds"])


def test_a_plan_is_simulated_as_what_it_compiles_to(model: Path, capsys: Capture) -> None:
    folder = built(model, TENSOR)
    options = "--machine", str(model.parent / "machine.yaml"), "--set", "batch=64"
    one = told(capsys, str(folder), *options)
    other = told(capsys, str(model.parent / "build.yaml"), "--model", str(model), *options)
    assert {**one, "where": ""} == {**other, "where": ""}
    assert "a plan is simulated with its model" in refused(capsys, str(model.parent / "build.yaml"), *options)


def test_alike_ranks_are_one_class(model: Path) -> None:
    plan = TENSOR.replace(
        "ranks: 2\n", "ranks: 64\nmesh: {dp: 32, tp: 2}\ndataset: data_parallel\noutputs: cut\n"
    ).replace("min: 1", "divisor: 32")
    artifact = open_artifact(built(model, plan))
    found = simulated(artifact, machine(), {"batch": 32_000})
    assert sum(len(one.ranks) for one in found.played.classes) == 64
    assert len(found.played.classes) <= 2
    alone = simulated(open_artifact(built(model, TENSOR + "outputs: cut\n", "two")), machine(), {"batch": 1000})
    agreement = machine().links[0].collective("AllReduce", 64, 0) - machine().links[0].collective("AllReduce", 2, 0)
    assert found.played.seconds == pytest.approx(alone.played.seconds + agreement, rel=1e-6)


def test_what_people_read(model: Path, capsys: Capture) -> None:
    folder = built(model, STAGES)
    capsys.readouterr()
    assert invoke(["simulate", str(folder), "--machine", str(model.parent / "machine.yaml"), "--set", "batch=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}: 2 ranks, a step takes ")
    assert lines[0].endswith(" at batch=8")
    assert lines[2].split("  ")[0] == "ranks"
    assert any(line.startswith("on the critical path") for line in lines)


def test_an_unknown_size_is_named(model: Path, capsys: Capture) -> None:
    folder = built(model, TENSOR)
    options = str(folder), "--machine", str(model.parent / "machine.yaml")
    found = refused(capsys, *options)
    assert "the size of 'batch' is not known" in found
    assert "help: give it, such as --set batch=1" in found
    assert "--set bach: there is no such symbol\n  help: the symbols are batch" in refused(
        capsys, *options, "--set", "bach=3"
    )


def test_a_step_needs_an_artifact_and_no_schedule(model: Path, capsys: Capture) -> None:
    machine_file = str(model.parent / "machine.yaml")
    assert "a step is played of an artifact" in refused(capsys, "--machine", machine_file)
    assert "a step is played of an artifact" in refused(
        capsys, str(built(model, TENSOR)), "--machine", machine_file, "-m", "4"
    )
    assert "--set, --model, --program and --hosts are of a step" in refused(
        capsys, "--ranks", "2", "-m", "4", "--set", "b=1"
    )


def traced(model: Path, plan: str, name: str, steps: int = 8) -> tuple[Path, Path]:
    """An artifact, and the trace of its run."""
    folder, trace = built(model, plan, name), model.parent / f"{name}.trace.json"
    given = [
        "--random",
        "1",
        "--set",
        "batch=64",
        "--repeat",
        str(steps),
        "--in-process",
        "--profile",
        str(trace),
        "-q",
    ]
    assert invoke(["run", str(folder), *given]) == 0
    return folder, trace


def test_a_trace_takes_the_place_of_the_machine(model: Path, capsys: Capture) -> None:
    folder, trace = traced(model, TENSOR, "build")
    found = told(capsys, str(folder), "--trace", str(trace), "--set", "batch=64")
    assert found["measured"]["steps"] == 5
    spans = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X" and one["cat"] == "step"]
    shortest = min(one["dur"] for one in spans if one["args"]["step"] > 3) / 1e6
    assert 0.3 * shortest < found["seconds"] < 3 * found["measured"]["seconds"]
    assert sum(one["seconds"] for one in found["path"]) == pytest.approx(found["seconds"])


def test_the_trace_of_another_artifact_is_refused(model: Path, capsys: Capture) -> None:
    folder, _ = traced(model, TENSOR, "build")
    _, other = traced(model, STAGES, "other")
    found = refused(capsys, str(folder), "--trace", str(other), "--set", "batch=64")
    assert "is the trace of another artifact: actions of this artifact are not in it" in found
    wide = built(model, TENSOR.replace("ranks: 2", "ranks: 4"), "wide")
    found = refused(capsys, str(wide), "--trace", str(other), "--set", "batch=64")
    assert "it has 2 ranks, and this artifact 4" in found


def test_a_trace_that_was_cut_short(model: Path, capsys: Capture) -> None:
    """It is read up to the last step that all ranks have ended; without one there is a message."""
    folder, trace = traced(model, TENSOR, "build")
    lines = trace.read_text().splitlines()
    second = max(k for k, line in enumerate(lines) if '"name": "step 2"' in line)
    trace.write_text("\n".join(lines[: second + 3]) + '\n{"ph": "X", "na')
    found = told(capsys, str(folder), "--trace", str(trace), "--set", "batch=64")
    assert found["measured"]["steps"] == 1
    trace.write_text("\n".join(lines[:6]) + "\n")
    found = refused(capsys, str(folder), "--trace", str(trace), "--set", "batch=64")
    assert found.startswith(f"{trace}: ")
    assert "has no step that all ranks have ended, for it was cut short" in found
