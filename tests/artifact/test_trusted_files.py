"""Files that an artifact has, or an option names, are read where they are regular and inside, and written where no link is."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mutated import change_manifest, correct
from mutation_kinds import KINDS, build
from partc.cli.main import invoke
from partc.runtime import ArtifactError, load_local
from partc.runtime.artifact.format import SCHEDULE
from partc.runtime.checker.check import check_artifact

SECONDS = 60


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A test that waits for a pipe fails."""
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(KINDS["pipeline"], tmp_path_factory.mktemp("pipeline") / "build")


@pytest.fixture
def folder(pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline, tmp_path / "build"))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that fails says."""
    assert invoke(list(words)) in (1, 2)
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize("file", ["manifest.json", "rank_0000.onnx", SCHEDULE])
def test_links_of_an_artifact_that_leave_it(folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    outside = folder.parent / "outside"
    shutil.copy(folder / file, outside)
    (folder / file).unlink()
    (folder / file).symlink_to(outside)
    for command in ("inspect", "simulate", "report"):
        assert f"the path '{file}' leaves the folder" in said(capsys, command, str(folder))
    assert check_artifact(folder) != []


def test_a_manifest_that_is_a_link_to_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "manifest.json"
    path.unlink()
    path.symlink_to(path.name)
    assert "the path 'manifest.json' leaves the folder" in said(capsys, "inspect", str(folder))


def test_a_profile_of_no_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = {f"{stage}{kind}{k}": [0.0] for stage in "01" for kind in "FB" for k in range(4)}
    rank = {"rank": 0, "step": [0.0], "tasks": tasks, "waits": {}, "kinds": {}, "arena": 0}
    (folder.parent / "times.json").write_text(json.dumps({"profile": 1, "ranks": [rank]}))
    invoke(["simulate", str(folder), "--times", str(folder.parent / "times.json")])
    assert "Traceback" not in capsys.readouterr().err


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(b"\xff\n"), "is not UTF-8 text"),
        (fifo, "is a pipe (FIFO), and no regular file"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "simulate"])
def test_the_text_of_a_schedule(
    folder: Path, change: Callable[[Path], object], told: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / SCHEDULE)
    if (folder / SCHEDULE).is_file():
        correct(folder)
    assert told in said(capsys, command, str(folder))


def test_weights_are_hashed_at_loading_and_by_check(tmp_path: Path) -> None:
    whole = build(KINDS["placed"], tmp_path / "build")
    weights = sorted((whole / "weights").iterdir())[0]
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="was changed: its CRC-32 is"):
        load_local(whole)
    assert "its content has changed" in str(check_artifact(whole)[0])
    load_local(whole, trust=True).close()


def test_data_of_an_artifact_that_are_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = build(KINDS["data parallel"], tmp_path / "build")
    outside, inside = tmp_path / "outside", whole / "records"
    outside.mkdir()
    inside.mkdir()
    np.save(outside / "x.npy", np.zeros((8, 6), np.float32))
    np.save(outside / "label.npy", np.zeros(8, np.int64))
    settings = {"data": "records", "batch": 4, "steps": 1}
    change_manifest(whole, lambda manifest: manifest["training"]["settings"].update(settings))
    change_manifest(whole, lambda manifest: manifest["training"].update(folder="."))
    for name in ("x.npy", "label.npy"):
        shutil.copy(outside / name, inside / name)
    assert invoke(["train", str(whole), "--in-process", "-q"]) == 0
    (inside / "x.npy").unlink()
    (inside / "x.npy").symlink_to(outside / "x.npy")
    assert f"train: data: {inside}, which would be read" in said(capsys, "train", str(whole), "--in-process", "-q")
    assert invoke(["train", str(whole), "--in-process", "-q", "--trust-code"]) == 0


def test_nothing_is_written_behind_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = build(KINDS["data parallel"], tmp_path / "build")
    np.savez(tmp_path / "d.npz", x=np.zeros((8, 6), np.float32), label=np.zeros(8, np.int64))
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    words = [
        "train",
        str(whole),
        "--data",
        str(tmp_path / "d.npz"),
        "--batch",
        "4",
        "--steps",
        "1",
        "-q",
        "--in-process",
    ]
    for option in ("--metrics", "--profile"):
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        assert f"{link}: is a link to {victim}" in said(capsys, *words, option, str(link))
        assert victim.read_text() == "mine"
        link.unlink()
        assert invoke([*words, option, str(link)]) == 0
        assert link.stat().st_size > 0
    lines = (tmp_path / "told").open("w")
    lines.close()
    assert invoke([*words, "--metrics", str(tmp_path / "told")]) == 0
    first = (tmp_path / "told").read_text()
    assert invoke([*words, "--metrics", str(tmp_path / "told")]) == 0
    assert (tmp_path / "told").read_text().startswith(first), "lines are appended"
    assert all(json.loads(line) for line in (tmp_path / "told").read_text().splitlines())


OPTIONS = [
    ["simulate", "--schedule", "1f1b", "--ranks", "2", "-m", "4", "--times", "{}"],
    ["simulate", "{build}", "--times", "{}"],
    ["simulate", "--rows", "{}", "--placement", "0,1", "-m", "2"],
    ["run", "{build}", "--hostfile", "{}", "--random", "0"],
    ["run", "{build}", "--input", "{}", "--in-process"],
    ["run", "{build}", "--input", "x={}", "--in-process"],
    ["train", "{build}", "--data", "{}", "--batch", "4", "--steps", "1", "--in-process"],
    ["train", "{build}", "--data", "x={}", "--batch", "4", "--steps", "1", "--in-process"],
    ["train", "{build}", "--plan", "{}", "--in-process"],
    ["train", "{build}", "--resume", "{}", "--data", "d.npz", "--batch", "4", "--in-process"],
    ["train", "{build}", "--init", "{}", "--data", "d.npz", "--batch", "4", "--in-process"],
    ["eval", "{build}", "--checkpoint", "{}", "--data", "d.npz", "--batch", "4", "--in-process"],
    ["checkpoint", "show", "{}"],
    ["checkpoint", "verify", "{}"],
    ["compile", "{}"],
    ["compile", "model.onnx", "--plan", "{}"],
    ["compile", "model.onnx", "--annotated", "{}"],
    ["verify", "{}"],
    ["plan", "{}"],
    ["check", "{}"],
    ["inspect", "{}"],
    ["report", "{}"],
    ["report", "{build}", "--trace", "{}"],
]
"""Commands with an option, or an argument, that names a file."""


@pytest.mark.parametrize("words", OPTIONS, ids=lambda words: " ".join(words[:4]))
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_options_that_name_a_pipe(
    words: list[str],
    kind: str,
    pipeline: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipe, an endless device, or a link to itself is refused at once."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "other"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    np.savez(tmp_path / "d.npz", x=np.zeros((8, 6), np.float32), label=np.zeros(8, np.int64))
    said(capsys, *(word.format(str(path), build=pipeline) for word in words))
