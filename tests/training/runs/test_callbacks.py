"""Callbacks of a file of the user's, and writers: called on rank 0 with the numbers of the log; a fault of theirs is one message."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from partc.cli.main import invoke
from training_command_case import PARALLEL, built, folder, train

__all__ = ["folder"]

WATCH = """
import json, pathlib, time
def note(*row):
    with open("noted", "a") as file:
        file.write(json.dumps(row) + "\\n")
def on_step(progress):
    note("step", progress.step, progress.metrics["loss"], progress.rate)
def on_evaluate(step, epoch, metrics):
    note("test", step, epoch, dict(metrics))
def on_save(step, path):
    note("save", step, path.name)
"""
LATE = """
import sys, threading
told, write, lines = threading.Event(), sys.stderr.write, []
def say(text):
    lines.append(text)
    write(text)
    if text == "\\n" and "waits for on_step" in "".join(lines):
        told.set()
def on_step(progress):  # until this rank has told that it waits
    sys.stderr.write = say
    assert told.wait(60)
"""
FAKE = """
class SummaryWriter:
    def __init__(self, folder): self.file = open(folder + "/events", "a")
    def add_scalar(self, name, value, step): self.file.write(f"{name} {step} {value}\\n")
    def close(self): self.file.close()
"""


def test_they_get_what_the_log_has(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PARALLEL + "  callbacks: watch.py\n  test: data.npz\n  steps: 10\n"
    (folder / "watch.py").write_text(WATCH)
    (folder / "fake").mkdir()
    (folder / "fake" / "tensorboardX.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder / "fake")
    build = str(built(folder, plan))
    board = folder / "board"
    board.mkdir()
    words = ["--checkpoint", "runs", "--metrics", "m.csv", "--tensorboard", str(board)]
    assert train(build, *words) == 0
    noted = [json.loads(line) for line in (folder / "noted").read_text().splitlines()]
    assert [row[:2] for row in noted] == [
        ["step", 5],
        ["test", 5],
        ["save", 5],
        ["step", 10],
        ["test", 10],
        ["save", 10],
    ]
    with open(folder / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", "5"),
        ("test", "5"),
        ("train", "10"),
        ("test", "10"),
    ]
    assert [float(row["loss"]) for row in rows] == [noted[0][2], noted[1][3]["loss"], noted[3][2], noted[4][3]["loss"]]
    scalars = (board / "events").read_text().splitlines()
    assert f"test/accuracy 10 {noted[4][3]['accuracy']}" in scalars
    assert any(line.startswith("train/lr 5 0.01") for line in scalars)
    (folder / "noted").unlink()
    background = str(built(folder, plan + "  checkpoint: {background: true, every: 1}\n", "background"))
    assert train(background, "--checkpoint", "beside", "--save", "1") == 0
    noted = [json.loads(line) for line in (folder / "noted").read_text().splitlines()]
    assert [row[1] for row in noted if row[0] == "save"] == [*range(1, 11)]
    capsys.readouterr()
    assert train(build, "--tensorboard", str(folder / "model.py" / "x")) == 2
    assert "--tensorboard" in capsys.readouterr().err
    assert invoke(["train", build, "--in-process"]) == 2, "code runs with the plan alone"
    assert "train: callbacks: `on_step, on_evaluate, on_save` of" in capsys.readouterr().err
    faults = {
        "def on_step(progress):\n    raise KeyError('gone')\n": r"watch\.py:2: KeyError: 'gone'\n.*calling on_step after step 5",
        "def on_stop(step): ...\n": r"'on_stop' is not an event of a training\n  help: the nearest is on_step",
        "x = 1\n": r"watch\.py: it has no callback",
        LATE: r"rank 0 waits for on_step of .*watch\.py, called after step 5",
    }
    for text, told in faults.items():
        (folder / "watch.py").write_text(text)
        assert (train(build, "--stall", "0.4", "--steps", "6") == 0) == (text is LATE)
        error = capsys.readouterr().err
        assert re.search(told, error), error
        assert "Traceback" not in error


def test_tensorboard_must_be_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partc.cli.output.training_log.find_spec", lambda name: None)
    assert train(str(built(folder, PARALLEL)), "--tensorboard", "board") == 2
    assert "neither tensorboard nor tensorboardX is installed" in capsys.readouterr().err
