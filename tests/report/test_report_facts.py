"""`partc report`: its facts are the numbers of `partc inspect` and `partc diff`, names cannot break the page, and what is refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.difference import facts_of
from partc.cli.main import invoke
from partc.cli.report.document import axes_of
from partc.cli.report.page import SCRIPTS, STYLES, json_text
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.ranks import ranks_text
from report_case import ROOT, Capture, data_of, lenet, printed, refused


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT of two stages, each data and tensor parallel, that trains in two microbatches."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "plan.yaml").write_text(
        """
ranks: 8
mesh: {pp: 2, dp: 2, tp: 2}
symbols: {batch: {divisor: 4}}
placement: {tokens: {pp: 0}, "layers.[0-1]": {pp: 0}, "layers.[2-3]": {pp: 1}, head: {pp: 1}}
sharding: {tokens: rowwise, "layers.*.*.project": colwise, "layers.*.*.out": rowwise, head: colwise}
dataset: data_parallel
outputs: cut
pipeline: {microbatches: 2, schedule: 1f1b}
train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}
  optimizer: {type: adamw, lr: 0.001}
  batch: 8
"""
    )
    compile_model(ROOT / "samples" / "gpt" / "model.py", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def trained_data(trained: Path) -> dict[str, Any]:
    """What its page has of it."""
    found: dict[str, Any] = data_of(trained, trained.parent, "--set", "seq=16")["artifacts"][0]
    return found


def test_the_facts_are_those_of_inspect(trained: Path, trained_data: dict[str, Any], capsys: Capture) -> None:
    found = trained_data
    said = printed(capsys, "inspect", trained, "--set", "seq=16")
    classes = {rank: one for one in found["classes"] for rank in one["list"]}
    assert 2 < len(found["classes"]) < len(classes) == 8
    for kind, key in (("ranks", "stats"), ("memory", "memory"), ("training", "training")):
        for rank, row in enumerate(said[kind]):
            assert {**classes[rank][key], "rank": rank} == row, (kind, rank)
    rows = [(one, end) for one in found["communication"] for end in one["ends"]]
    assert sum(one["times"] for one in found["communication"]) == len(rows)
    messages = Counter((*end, one["type"], one["bytes"]) for one, end in rows if one["op"] == "Send")
    assert {key[:3] + key[4:] for key in messages} == {
        (one["source"], one["target"], one["tag"], one["bytes"]) for one in said["transfers"]
    }
    calls = {(end[0], one["op"], one["bytes"], one["cause"]) for one, end in rows if one["op"] != "Send"}
    assert calls == {(one["tag"], one["op"], one["bytes"], one["cause"]) for one in said["collectives"]}
    assert {one["cause"] for one in found["communication"]} <= {
        one["cause"] for one in [*said["transfers"], *said["collectives"]]
    }
    rows = said["pipeline"]["rows"]
    assert [(one["row"], one["kept"]) for one in found["schedule"]["homes"]] == [(r["row"], r["kept"]) for r in rows]


def test_ranks_and_collectives_stand_on_the_mesh(trained_data: dict[str, Any]) -> None:
    assert trained_data["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    for one in trained_data["classes"]:
        places = [np.unravel_index(rank, (2, 2, 2)) for rank in one["list"]]
        for k, name in enumerate(("pp", "dp", "tp")):
            assert one["at"][name] == ranks_text(sorted({int(place[k]) for place in places}))
    axes = {(one["axes"], *one["lists"]) for one in trained_data["communication"] if one["op"] != "Send"}
    assert {("tp", "0-1", "2-3"), ("tp", "4-5", "6-7"), ("dp", "0,2", "1,3"), ("dp", "4,6", "5,7")} <= axes
    assert axes_of({"a": 2, "b": 3}, [[0, 1, 2, 3, 4, 5]]) == "a, b"
    assert (
        axes_of({"a": 2, "b": 3}, [[0, 1], [3, 4]])
        == axes_of({"a": 2, "b": 3}, [[0, 4]])
        == axes_of({}, [[0, 1]])
        == ""
    )


def test_the_memory_over_a_step_is_below_the_peak_and_reaches_what_arenas_hold(trained_data: dict[str, Any]) -> None:
    for one, curve in zip(trained_data["classes"], trained_data["memory"], strict=True):
        arena = sum(target["between"] for target in one["memory"]["targets"])
        assert 0.5 * arena < max(curve["between"]) <= arena
        most = curve["between"][curve["most"]] + curve["inside"][curve["most"]]
        assert most == max(map(sum, zip(curve["between"], curve["inside"], strict=True)))
        assert curve["kept"] + most <= one["memory"]["peak"]
        assert len(curve["what"]) == len(curve["between"])
        assert curve["between"][-1] < max(curve["between"])


def test_measures_and_changes_are_those_of_diff(tmp_path: Path, capsys: Capture) -> None:
    before = lenet(tmp_path, "before")
    after = lenet(tmp_path, "after", ("fc3: 2", "fc3: 1"))
    data, said = data_of(after, tmp_path, "--against", before), printed(capsys, "diff", before, after)
    program = data["difference"]["programs"][0]
    assert program["changes"] == said["programs"]["infer"]["changes"]
    for at, side in ((0, "after"), (1, "before")):
        measures = {name: one[side] for name, one in said["programs"]["infer"]["measures"].items()}
        assert data["artifacts"][at]["measures"] == measures
        assert {one["name"]: one[side] for one in program["measures"]} == measures


def test_measures_of_classes_are_those_of_all_ranks(trained: Path, trained_data: dict[str, Any]) -> None:
    assert trained_data["measures"] == facts_of(open_artifact(trained, trust=True), {"batch": 8, "seq": 16}).measures


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    import onnx

    name = "</script><script>alert(1)</script><!--'\"&\u2028"
    text = json_text({"name": name})
    assert {*"<>&\u2028"}.isdisjoint(text)
    assert json.loads(text) == {"name": name}
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name=name.replace("\u2028", ""))
    port = [onnx.helper.make_tensor_value_info(one, 1, ["batch", 3]) for one in "xy"]
    graph = onnx.helper.make_graph([node], "hostile", port[:1], port[1:])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 1\n")
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert "alert(1)" in str(data_of(tmp_path / "build", tmp_path)["artifacts"][0]["graph"]["texts"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == page.count("</script>") == 1 + len(SCRIPTS)


def test_every_file_of_the_page_is_in_it() -> None:
    folder = ROOT / "cli" / "report"
    files = {str(path.relative_to(folder)) for end in ("*.js", "*.css") for path in folder.rglob(end)}
    assert files == {*SCRIPTS, *STYLES}
    longest = max(len(path.read_text().splitlines()) for path in folder.glob("*.[jc]*s"))
    assert longest <= 450


def test_libraries_are_those_that_the_list_names() -> None:
    import hashlib

    folder = ROOT / "cli" / "report" / "vendor"
    listed = (folder / "README.md").read_text()
    for path in folder.glob("*.min.*"):
        assert f"`{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()}`" in listed
        assert "sourceMappingURL" not in path.read_text()


def test_bad_input_has_one_message(tmp_path: Path, capsys: Capture) -> None:
    build, out = lenet(tmp_path, "build"), tmp_path / "report.html"
    assert "there is no such folder" in refused(capsys, 1, tmp_path / "none", "-o", out)
    assert "no such symbol" in refused(capsys, 2, build, "-o", out, "--set", "bach=1")
    assert "it must be at least 1" in refused(capsys, 2, build, "-o", out, "--set", "batch=0")
    assert "is a directory" in refused(capsys, 2, build, "-o", tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, 1, build, "-o", tmp_path / "file" / "report.html")
    assert "No such file" in refused(
        capsys, 2, build, "-o", out, "--trace", tmp_path / "x.trace.json", "--set", "batch=1"
    )
    (tmp_path / "x.trace.json").write_text("{}")
    assert "not a trace of partc" in refused(
        capsys, 2, build, "-o", out, "--trace", tmp_path / "x.trace.json", "--set", "batch=1"
    )
    os.truncate(build / "rank_0003.onnx", 40)
    assert "the manifest says" in refused(capsys, 1, build, "-o", out)
    assert not out.exists()


def test_a_trace_is_beside_the_simulation(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    build = lenet(tmp_path, "build", ("fc3: 2", "fc3: 1"))  # rank 2 has nothing to do
    trace, out = tmp_path / "x.trace.json", tmp_path / "report.html"
    run = ["run", build, "--in-process", "--random", "7", "--set", "batch=2", "--repeat", "5", "--profile", trace]
    assert invoke([*map(str, run), "-o", str(tmp_path / "y.npz")]) == 0
    assert "the size of 'batch' is not known" in refused(capsys, 2, build, "-o", out, "--trace", trace)
    options = ("--trace", trace, "--set", "batch=2")
    timeline = data_of(build, tmp_path, *options)["artifacts"][0]["timeline"]
    said = printed(capsys, "simulate", build, *options)
    assert timeline["simulated"]["seconds"] == said["seconds"]
    assert timeline["measured"]["median"] == said["measured"]["seconds"]
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    step = timeline["measured"]["step"]
    for row in timeline["measured"]["ranks"]:
        own = [one for one in events if one["pid"] == row["rank"] and one["args"]["step"] == step]
        assert [span[1] for span in row["spans"]] == [one["name"] for one in own if one["cat"] != "step"]
        assert [span[4] for span in row["spans"]] == pytest.approx(
            [one["dur"] / 1e6 for one in own if one["cat"] != "step"]
        )
    other = lenet(tmp_path, "other")
    with monkeypatch.context() as before_work:
        for name in ("document.rank_classes", "page.differences"):
            before_work.setattr(f"partc.cli.report.{name}", lambda *_: pytest.fail("a report is made"))
        for more in ((), ("--against", build)):
            said = refused(capsys, 2, other, "-o", tmp_path / "z.html", *options, *more)
            assert "is the trace of another artifact" in said
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join(lines[:-4]))
    found: dict[str, Any] = data_of(build, tmp_path, *options)["artifacts"][0]["timeline"]["measured"]
    assert (found["whole"], [one["rank"] for one in found["ranks"]]) == (False, [0, 1, 3, 4])
    trace.write_text("\n".join(lines[:9]))
    assert "has no step that all ranks have ended, for it was cut short" in refused(
        capsys, 2, build, "-o", out, *options
    )
