"""Trainings over MPI that are killed while they save, at any moment, and go on: the result has every byte of one that was never killed.

python tests/fuzz/saving.py --kills 100 --seed 1 [--background]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.newest import latest
from partc.runtime.checkpoint.verify import verify

MODEL = """
from partc.compiler import Input, Symbol, nn
nn.seed(3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 900), nn.Linear(900, 6)
        self.drop = nn.Dropout(0.25)
    def forward(self, op, x):
        return self.b(op, self.drop(op, op.Tanh(self.a(op, x))))
model = Net()
inputs = {"x": Input([Symbol(), 64], "float32")}
outputs = ["y"]
"""
PLAN = """
ranks: 2
placement: {a: 0, b: 1}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.001}
  batch: 12
  log: 100000
"""
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
KEEP = 2
_WHILE_SAVING = 0.75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--background", action="store_true", help="save while training goes on")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder, given.background)
        told = killed(folder, given.kills, random.Random(given.seed))
        last = latest(folder / "runs")
        assert last is not None
        total = int(last.name[5:]) + 3
        train_here(folder, "runs", "--save", "1", "--resume", "--steps", str(total))
        train_here(folder, "whole", "--save", str(total), "--steps", str(total))
        have, want = (folder / name / f"step_{total:08d}" for name in ("runs", "whole"))
        differ = [file.name for file in sorted(want.iterdir()) if (have / file.name).read_bytes() != file.read_bytes()]
        left = sorted({path.name for path in (folder / "runs").iterdir()} - {have.name, f"step_{total - 1:08d}"})
    print(
        f"{given.kills} kills {told}; {total} steps; files that differ: {differ or 'none'}; beside the last two: {left}"
    )
    sys.exit(1 if differ or left != [".lock", ".written.json"] else 0)


def prepare(folder: Path, background: bool = False) -> None:
    """A model, its data, and its artifact for two ranks."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 64)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, label=x[:, :6].argmax(1).astype(np.int64))
    (folder / "model.py").write_text(MODEL)
    saves = "  checkpoint: {background: true}\n" if background else ""
    (folder / "plan.yaml").write_text(PLAN + saves)
    compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")


def options(folder: Path, kept: str, words: Sequence[str]) -> list[str]:
    """The words of `partc train` that keeps its checkpoints in this folder of the folder."""
    data, runs = str(folder / "data.npz"), str(folder / kept)
    build = str(folder / "build")
    return ["train", build, "--threads", "1", "--data", data, "--checkpoint", runs, "--keep", str(KEEP), *words]


def train(folder: Path, kept: str, *words: str) -> subprocess.Popen[str]:
    """A training over MPI, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "partc.cli", *options(folder, kept, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )


def train_here(folder: Path, kept: str, *words: str) -> None:
    """The same training by ranks that are threads of this process: as good to compare with, and sooner there."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = invoke([*options(folder, kept, words), "--in-process"])
    assert code == 0, f"exit code {code}"


def killed(folder: Path, kills: int, chance: random.Random) -> dict[str, int]:
    """Kills so many trainings, each of which goes on from the one before; what the kills met."""
    told = {"in the writing of files": 0, "between renames": 0, "elsewhere": 0}
    runs = folder / "runs"
    for _ in range(kills):
        resume = ["--resume"] if latest(runs) else []
        process = train(folder, "runs", "--save", "1", "--steps", "1000000", *resume)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("wrote"):
                break
        else:
            raise AssertionError("".join(lines))
        known = int(line.split("step_")[1][:8])
        ranks = ranks_of(folder)
        assert len(ranks) == 2, lines
        if chance.random() < _WHILE_SAVING:
            while not any(name.startswith(".step") for name in os.listdir(runs)):
                pass
            time.sleep(chance.uniform(0, 0.05))
        else:
            time.sleep(chance.uniform(0, 0.2))
        for rank in chance.choice([ranks, ranks, ranks[:1], ranks[1:]]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        process.communicate()
        hidden = [path.name for path in runs.iterdir() if path.name.startswith(".step")]
        if any(name.endswith("saving") for name in hidden):
            told["in the writing of files"] += 1
        elif hidden:
            told["between renames"] += 1
        else:
            told["elsewhere"] += 1
        last = latest(runs)
        assert last is not None, "no checkpoint is left"
        assert int(last.name[5:]) >= known, f"step {known} was told, and {last} is left"
        assert verify(last) == [], verify(last)
    return told


def ranks_of(folder: Path) -> list[int]:
    """The processes of the ranks, rank 0 first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (path / "cmdline").read_bytes()
            if b"partc.cli.job" in text and str(folder).encode() in text:
                words = dict(word.partition(b"=")[::2] for word in (path / "environ").read_bytes().split(b"\0"))
                if rank := words.get(b"OMPI_COMM_WORLD_RANK"):
                    found.append((int(rank), int(path.name)))
    return [process for _, process in sorted(found)]


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    main()
