"""The law of run lists: what a compile writes is proven, and each planted fault of a list is found, though its hash fits."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.runtime import ArtifactError, load_local
from partc.runtime.checker.check import check_artifact
from small_training import PERCEPTRON, compiled

LOOKED_UP = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch] x) => (float[batch, 3] y) <float[6, 3] table> { [look] y = Gather <axis = 0> (table, x) }"""
PLAN = """ranks: 2
placement: {one: 0, plus: 0, turn: 0, two: 1}
pipeline: {microbatches: 2, schedule: 1f1b}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = compiled(tmp_path_factory.mktemp("listed") / "build", PERCEPTRON, PLAN)
    assert check_artifact(folder) == []
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "rank_0000.run.json") -> None:
    """Changes a run list, and its hash in the manifest."""
    listed = json.loads((folder / name).read_text())
    change(listed)
    text = json.dumps(listed).encode()
    (folder / name).write_bytes(text)
    index = json.loads((folder / "manifest.json").read_text())
    index["files"][name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(index))


def in_buffer(change: Callable[[list[str]], list[str]]) -> Callable[[dict[str, Any]], None]:
    """Changes the members of the first buffer of the state."""

    def changed(listed: dict[str, Any]) -> None:
        buffer = next(one for one in listed["buffers"] if one["kind"] == "state")
        buffer["members"] = change(buffer["members"])

    return changed


def row(pattern: str, instead: str, name: str = "train") -> Callable[[dict[str, Any]], None]:
    def change(listed: dict[str, Any]) -> None:
        before = listed["rows"][name]
        listed["rows"][name] = re.sub(pattern, instead, before, count=1)
        assert listed["rows"][name] != before, before

    return change


def of_segment(key: str, instead: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Changes a key of the first segment that has it."""

    def change(listed: dict[str, Any]) -> None:
        segment = next(one for one in listed["segments"] if one.get(key))
        segment[key] = instead(segment[key])

    return change


SECOND = "rank_0001.run.json"
FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "a value is read before it has come": (SECOND, row("W0 1F0", "1F0 W0"), "1F0 reads 'hr.0' before it is there"),
    "a segment runs too late": ("", row("S0 0F0", "0F0 S0"), "0F0 reads 'x.0' before it is there"),
    "nothing is waited for": ("", row(" W4", ""), "nothing waits for 4"),
    "it is waited for twice": ("", row("W4", "W4 W4"), "W4 waits for what has not begun"),
    "a message is left out": ("", row(" X1", ""), "no step begins it"),
    "messages change places": ("", row("X0 0F1 X1", "0F1 X1 X0"), "begins out of the order of the file"),
    "tasks change places": (SECOND, row("1F0 1B0 X2 W1 1F1", "W1 1F1 1F0 1B0 X2"), "1F0 begins out of the order"),
    "a task is left out": (SECOND, row(" 1B1", ""), "X3 reads 'hr.grad.1' before it is there"),
    "a receive is another kind of step": ("", row("R2", "X2"), "X2 is not a step of it"),
    "an update runs before its gradients": ("", row("S2 U0", "U0 S2"), "U0 reads 'gradients.scale' before it is there"),
    "an update runs twice": ("", row("U0", "U0 U0"), "after it is overwritten"),
    "a step that reads old values comes after": ("", row("0B1(.*) U0", r"\1 U0 0B1"), "before it is there"),
    "no update": ("", row("U0 ", ""), "no step makes the output 'shift.next'"),
    "a step of nothing": ("", row("S0", "S9"), "S9 is of nothing in the file"),
    "no row": ("", lambda listed: listed["rows"].pop("F0"), "there is no such row"),
    "a row of nothing": ("", lambda listed: listed["rows"].update(W7="S0"), "row 'W7' is of nothing in the file"),
    "a node runs twice": ("", row("S1", "S1 S1"), "S1 runs it again"),
    "a node is left out": ("", of_segment("nodes", lambda text: "0-1"), "S0 gives 'first.grad.sum.zeros', which"),
    "nodes that there are not": (
        "",
        of_segment("nodes", lambda text: "0-999"),
        "is not a rising list of nodes of 0 to",
    ),
    "an input is not said": (
        "",
        of_segment("inputs", lambda names: []),
        "S0 says otherwise than its nodes whether they read 'x'",
    ),
    "an input too many": ("", of_segment("inputs", lambda names: [*names, "first"]), "they read 'first'"),
    "an output too few": ("", of_segment("outputs", lambda names: names[1:]), "0F0 reads 'x.0' before it is there"),
    "a weight is not said": (
        "",
        of_segment("weights", lambda names: names[1:]),
        "whether they read 'shift.grad.sum.shape'",
    ),
    "another target": (
        "",
        lambda listed: listed["segments"][0].update(target="cuda"),
        "S0 runs it on 'cuda', its target is ''",
    ),
    "a compute node as an update": (
        "",
        lambda listed: listed["updates"][0].update(nodes="16-18"),
        "not an update on ''",
    ),
    "a group of other nodes": (
        "",
        lambda listed: listed["updates"][0].update(groups=["17"]),
        "the groups of U0 are not",
    ),
    "operands that do not follow": ("", in_buffer(lambda names: names[::-1]), "nothing says that"),
    "memory of two buffers": ("", lambda listed: listed["buffers"].append(listed["buffers"][0]), "in several buffers"),
    "another file's list": (
        "",
        lambda listed: listed.update(program="0" * 64),
        "it is not of the artifact's rank_0000.onnx",
    ),
    "a field that there is not": ("", lambda listed: listed.update(more=1), "Extra inputs are not permitted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(built: Path, tmp_path: Path, fault: str) -> None:
    file, change, fact = FAULTS[fault]
    folder = Path(shutil.copytree(built, tmp_path / "build"))
    rewrite(folder, change, file or "rank_0000.run.json")
    found = [str(one) for one in check_artifact(folder)]
    assert any(fact in one and one.startswith(file or "rank_0000.run.json") for one in found), found


def test_what_several_threads_would_lose_is_found(tmp_path: Path) -> None:
    folder = compiled(tmp_path / "build", LOOKED_UP, "ranks: 1\n")
    rewrite(folder, lambda listed: next(one for one in listed["segments"] if one.get("threads")).pop("threads"))
    assert "in several threads" in str(check_artifact(folder))


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        (row("S0", "S9"), "there is no segment for S9"),
        (row("U0", "U9"), "there is no update for U9"),
        (row("X0", "X77"), "no node has the tag of X77"),
        (row("R2", "A2"), "A2 is not a step of a Recv"),
        (row("0F1", "0F9"), "the file has no task '0F9'"),
        (row(" W4", ""), "does not wait once for each message"),
        (row("S1", "S1 S1"), "runs 2 times"),
        (lambda listed: listed["rows"].pop("train"), "it has no row 'train'"),
        (of_segment("nodes", lambda text: "0-999999999"), "is not a rising list of nodes"),
        (of_segment("outputs", lambda names: ["nothing"]), "do not make what it gives"),
        (lambda listed: listed["segments"][0].update(target="tpu"), "a target is one of cpu, cuda, device"),
        (in_buffer(lambda names: names[::-1]), "do not follow each other in memory"),
        (in_buffer(lambda names: [names[0], "x.0"]), "are not of one buffer"),
        (lambda listed: listed["updates"][0].update(groups=["17", "17-18"]), "the groups of U0 are not its nodes"),
        (lambda listed: listed.update(program="0" * 64), "the run list of rank 0: it is not of the artifact's"),
    ],
)
def test_a_load_refuses_a_list_that_is_not_of_the_file(
    built: Path, tmp_path: Path, fault: Callable[[dict[str, Any]], object], fact: str
) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "build"))
    rewrite(folder, fault)
    with pytest.raises(ArtifactError, match=re.escape(fact)):
        load_local(folder)


def test_a_damaged_list_is_named_and_a_file_without_one_runs_alike(built: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "build"))
    fed = {"x": np.ones((4, 6), np.float32), "t": np.zeros((4, 3), np.float32), "lr": np.float32(0.1)}
    (folder / SECOND).write_text((folder / SECOND).read_text().replace("S", "s", 1))
    with pytest.raises(ArtifactError, match=r"rank_0001\.run\.json: was changed"):
        load_local(folder)
    index = json.loads((folder / "manifest.json").read_text())
    index["files"] = {name: record for name, record in index["files"].items() if not name.endswith(".run.json")}
    (folder / "manifest.json").write_text(json.dumps(index))
    losses = []
    for place in (built, folder):
        with load_local(place) as program:
            losses.append([program(fed)["loss"].tolist() for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
