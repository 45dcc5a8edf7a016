"""Trainings over MPI with `--restarts`, whose processes are lost at random moments: each ends with the losses and the bits of one that was
never disturbed, from copies in memory or the disk, also where it continues on another number of ranks; what is the user's mistake is not
repeated.

    python tests/fuzz/restarts.py --failures 200 --seed 1
    python tests/fuzz/restarts.py --failures 20 --only memory

    kill       a rank gets SIGKILL
    stop       a rank is stopped, and goes on after a moment
    silent     a rank is stopped, and then killed
    launcher   the launcher of the ranks gets SIGKILL
    memory     a rank gets no more memory from now on, also while MPI begins
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.newest import latest
from saving import ENVIRONMENT, MODEL, prepare

PLAN = """
ranks: 4
elastic: {ranks: [4, 2, 1], parts: 12, copies: 1, every: 3}
dataset: data_parallel
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.001, shard: true}
  clip: {norm: 1.0}
  data: {source: data.npz, transform: "slow.py:slow"}
  batch: 12
  log: 1
"""
SLOW = '''
import os, time

def slow(batch):
    """A batch that takes its time; one of them is a mistake, where the environment says so."""
    slow.calls += 1
    if slow.calls == int(os.environ.get("PARTC_MISTAKE", "0")):
        raise ValueError("a mistake")
    time.sleep(0.02)
    return batch

slow.calls = 0
'''
KINDS = ("kill", "stop", "silent", "launcher", "memory")
STEPS, SAVE = 36, 4
MOST, WITHIN = 3, 120.0
"""The most failures of one training, and the seconds in which it must have ended; more where an undisturbed one takes long."""


@dataclass
class Outcome:
    """How a training ended: its exit code, what it said, the failures that met a process, and its seconds."""

    code: int | None
    said: str
    met: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS))
    options = parser.parse_args()
    chance, kinds = Random(options.seed), options.only.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build(folder)
        whole = trained(folder, "whole", {4: STEPS}, [])
        assert whole.code == 0, whole.said
        wanted, counts, wrong, lost, number = state(folder / "whole"), Counter[str](), 0, 0.0, 0
        usual = whole.seconds
        while sum(counts.values()) < options.failures:
            number += 1
            failures = [(chance.uniform(0, usual), chance.choice(kinds)) for _ in range(chance.randint(1, MOST))]
            numbers = {4: STEPS} if chance.random() < 0.7 else {4: STEPS // 3, 2: STEPS}
            within = max(WITHIN, 12 * whole.seconds)
            outcome = trained(folder, f"runs{number}", numbers, sorted(failures), chance, within=within)
            counts.update(outcome.met)
            usual = usual if outcome.met else min(usual, outcome.seconds)
            problems = judged(folder, f"runs{number}", outcome, wanted)
            wrong += bool(problems)
            lost += (outcome.seconds - whole.seconds) * (len(numbers) == 1)
            print(f"{number}: {outcome.met}, {outcome.seconds:.1f} s", file=sys.stderr, flush=True)
            for problem in problems:
                print(f"training {number}, {failures}: {problem}\n{outcome.said[-2000:]}", flush=True)
        mistake = trained(
            folder, "mistake", {4: STEPS}, [], environment={"PARTC_MISTAKE": str(chance.randint(1, STEPS))}
        )
        repeated = mistake.code != 1 or "a mistake" not in mistake.said or "starts the ranks again" in mistake.said
        wrong += repeated
    total = sum(counts.values())
    print(
        f"{total} failures of {number} trainings {dict(sorted(counts.items()))}, {wrong} wrong; an undisturbed one takes "
        f"{whole.seconds:.1f} s, a failure {lost / max(1, total):.1f} s; a mistake {'was repeated' if repeated else 'ended it'}"
    )
    sys.exit(1 if wrong else 0)


def build(folder: Path) -> None:
    """The artifact of three numbers of ranks, and its data."""
    prepare(folder)
    (folder / "model.py").write_text(MODEL.replace("900", "96").replace("Symbol()", "Symbol(divisor=12)"))
    (folder / "slow.py").write_text(SLOW)
    (folder / "plan.yaml").write_text(PLAN)
    compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")


def trained(
    folder: Path,
    kept: str,
    numbers: Mapping[int, int],
    failures: list[tuple[float, str]],
    chance: Random | None = None,
    environment: Mapping[str, str] = os.environ,
    within: float = 10 * WITHIN,
) -> Outcome:
    """Trains on each number of ranks up to its steps; `failures` are seconds after the start, with their kinds."""
    begun, outcome, due = time.monotonic(), Outcome(0, ""), list(failures)
    for ranks, steps in numbers.items():
        mark = uuid.uuid4().hex
        words = ["--checkpoint", kept, "--save", str(SAVE), "--steps", str(steps), "--metrics", f"{kept}.jsonl"]
        command = ["train", "build", "--plan", "plan.yaml", "-n", str(ranks), "--threads", "1", "--restarts", "10"]
        with (folder / f"{kept}.out").open("w+") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "partc.cli", *command, *words, "--resume", "auto"],
                cwd=folder,
                stdout=out,
                stderr=out,
                env={**ENVIRONMENT, **environment, "PARTC_RESTARTS": mark, "OMP_NUM_THREADS": "1"},
            )
            while process.poll() is None and time.monotonic() < begun + within:
                if due and time.monotonic() > begun + due[0][0] and chance is not None:
                    _, kind = due.pop(0)
                    outcome.met += [kind] * strike(kind, mark, chance)
                time.sleep(0.01)
            if process.poll() is None:
                process.kill()
            outcome.code = process.wait()
            out.seek(0)
            outcome.said += out.read()
        if outcome.code:
            break
    outcome.seconds = time.monotonic() - begun
    return outcome


def strike(kind: str, mark: str, chance: Random) -> bool:
    """Has a failure happen to one of the job's processes; whether there was one."""
    ranks, launchers = processes(mark)
    there = launchers if kind == "launcher" else ranks
    if not there:
        return False
    pid = chance.choice(there)
    with contextlib.suppress(ProcessLookupError):
        if kind == "memory":
            resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        if kind in ("stop", "silent"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.05, 1.0))
        os.kill(pid, signal.SIGCONT if kind in ("stop", "memory") else signal.SIGKILL)
    return True


def processes(mark: str) -> tuple[list[int], list[int]]:
    """The ranks of a job, and its launchers, by the mark in their environment."""
    ranks, launchers = [], []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not path.name.isdecimal() or f"PARTC_RESTARTS={mark}".encode() not in (path / "environ").read_bytes():
                continue
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"OMPI_COMM_WORLD_RANK=" in (path / "environ").read_bytes():
                ranks.append(int(path.name))
            elif words and words[0].rpartition(b"/")[2] in (b"mpiexec", b"mpirun", b"prterun"):
                launchers.append(int(path.name))
    return ranks, launchers


def state(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors of the newest checkpoint."""
    newest = latest(folder)
    assert newest is not None
    checkpoint = Checkpoint.open(newest)
    return {name: checkpoint.read(name).tobytes() for name in checkpoint.index.tensors}


def losses(file: Path) -> dict[int, set[float]]:
    """Maps each step to the losses that were logged for it, several where it was repeated."""
    found: dict[int, set[float]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        found.setdefault(line["step"], set()).add(line["loss"])
    return found


def judged(folder: Path, kept: str, outcome: Outcome, wanted: Mapping[str, bytes]) -> list[str]:
    """What is wrong with a training that was disturbed."""
    if outcome.code != 0:
        return [f"exit code {outcome.code}"]
    problems = []
    if differ := [name for name, data in state(folder / kept).items() if data != wanted[name]]:
        problems.append(f"{len(differ)} tensors differ, {', '.join(differ[:3])}")
    if losses(folder / f"{kept}.jsonl") != losses(folder / "whole.jsonl"):
        problems.append("the losses differ")
    return problems


if __name__ == "__main__":
    main()
