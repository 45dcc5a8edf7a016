"""Signals at random moments after the start of a command: each ends with a sentence and a documented exit code, and leaves nothing.

    python tests/fuzz/early_signals.py --count 200 --seed 1
    python tests/fuzz/early_signals.py --count 20 --only compile,verify

A signal that comes before Python has reached the first line of partc has the system's default action. The table counts these cases as
`python`: the process had no handler of the signal, which /proc tells, when it was sent.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

import numpy as np
import onnx
from decoders import decoder
from kill_case import _OF_ONNXRUNTIME
from kill_job import read, send
from partc.compiler.pipeline import compile_model
from partc.runtime.job.status_board import states
from small_training import DATA_PARALLEL, MOMENTUM, PERCEPTRON, compiled, with_numbers

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
WITHIN = 15.0
"""Seconds in which a command must have ended."""
_GENERATE = "ranks: 2\nsharding: {head: colwise}\ngenerate: {slots: 2, length: 120, chunk: 8}\n"
_INFER = "ranks: 2\nsharding: {one: {in: [[2, 1], [1, 1]]}}\nsymbols: {batch: {divisor: 2}}\n"
_LONG = "10000000"
COMMANDS = {
    "train": (
        "train",
        "trained",
        "--data",
        "data.npz",
        "--batch",
        "4",
        "--steps",
        _LONG,
        "--checkpoint",
        "kept",
        "--save",
        _LONG,
    ),
    "train alone": ("train", "trained", "--data", "data.npz", "--batch", "4", "--steps", _LONG, "--in-process"),
    "run": ("run", "inferred", "--input", "x.npz", "-o", "y.npz", "--repeat", _LONG),
    "run alone": ("run", "inferred", "--input", "x.npz", "-o", "y.npz", "--repeat", _LONG, "--in-process"),
    "serve": ("serve", "generated", "--port", "0"),
    "generate": ("generate", "generated", "--ids", "3,1,4,1,5", "--max-tokens", "100"),
    "plan": ("plan", "model.onnx", "-o", "proposal.yaml", "--ranks", "2", "--batch", "64"),
    "compile": ("compile", "model.onnx", "--plan", "plan.yaml", "-o", "built"),
    "verify": ("verify", "model.onnx", "--plan", "plan.yaml", "--mpi"),
    "check": ("check", "inferred"),
    "simulate": ("simulate", "inferred"),
    "doctor": ("doctor",),
}
"""Commands by name, in a folder that `prepare` has made."""
_ENDLESS = ("train", "run", "serve")
FIRST = ("train", "run", "serve", "generate", "plan")


@dataclass(frozen=True)
class Outcome:
    """How a command ended: a word for the table, and what is wrong."""

    word: str
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def prepare(folder: Path) -> None:
    """The artifacts, models and data of all commands."""
    compiled(folder / "trained", PERCEPTRON, DATA_PARALLEL, MOMENTUM)
    onnx.save(with_numbers(PERCEPTRON), folder / "model.onnx")
    (folder / "plan.yaml").write_text(_INFER)
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "inferred")
    onnx.save(decoder(), folder / "decoder.onnx")
    (folder / "generate.yaml").write_text(_GENERATE)
    compile_model(folder / "decoder.onnx", folder / "generate.yaml", folder / "generated")
    np.savez(folder / "data.npz", x=np.ones((64, 6), np.float32), t=np.ones((64, 3), np.float32))
    np.savez(folder / "x.npz", x=np.ones((2, 6), np.float32))


def outcome(command: str, name: str, delay: float, folder: Path, here: Path) -> Outcome:
    """Sends the signal so many seconds after the start of the command, whose files are in `folder`, and sees how it ends."""
    mark, temporary = uuid.uuid4().hex, here / "tmp"
    temporary.mkdir(parents=True)
    for path in folder.iterdir():
        (here / path.name).symlink_to(path)
    environment = {**os.environ, "TMPDIR": str(temporary), "PARTC_EARLY": mark, "OMP_NUM_THREADS": "1"}
    number = int(getattr(signal, name))
    with (here / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "partc.cli", *COMMANDS[command]],
            cwd=here,
            env=environment,
            stdout=out,
            stderr=out,
        )
        time.sleep(delay)
        caught = int((re.search(rb"SigCgt:\s*(\w+)", read(process.pid, "status")) or [0, b"0"])[1], 16)
        listens = bool(caught >> signal.SIGUSR1 - 1 & 1)  # Python itself catches SIGINT
        over = process.poll() is not None
        process.send_signal(number)
        begun = time.monotonic()
        try:
            code = process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - begun
    while (left := _alive(mark)) and time.monotonic() < begun + WITHIN:
        time.sleep(0.05)
    said = (here / "out").read_text(errors="replace")
    word, problems = _judged(command, name, code, said, listens, over)
    problems += [f"still there: {read(pid, 'cmdline')[:80]!r}" for pid in left]
    for pid in left:
        send(pid, "SIGKILL")
    process.wait()
    files = [path for path in (*temporary.iterdir(), *here.glob(".*")) if path.name != _OF_ONNXRUNTIME]
    runs = [Path("/dev/shm") / path.name for path in files]
    problems += [f"left: {path}" for path in (*files, *runs) if path.exists() and word != "python"]
    problems += [f"| {line}" for line in said.splitlines()[-6:]] * bool(problems)
    return Outcome(word, tuple(problems), seconds)


def _judged(command: str, name: str, code: int | None, said: str, listens: bool, over: bool) -> tuple[str, list[str]]:
    number = int(getattr(signal, name))
    if code is None:
        return "hangs", ["it does not end"]
    problems = [f"'{word}' is printed" for word in ("Traceback", "bug in partc", "Exception ignored") if word in said]
    if over or (code == 0 and "stopped by" not in said):
        return "over", problems + [f"exit code {code}"] * (code != 0)
    if not listens and (code == -number or name == "SIGINT"):
        return "python", []
    if code == -number:
        return "wordless", [*problems, "the default action"]
    told = re.search(rf"stopped by {name}\b|^(no more requests|draining|the server)", said, re.MULTILINE) is not None
    problems += [] if told else ["no sentence"]
    saves = command == "train" or "before the first step" in said
    right = {128 + number} if name in ("SIGINT", "SIGHUP") or not (command.startswith("train") and saves) else {75}
    right |= {0} if command == "serve" and name in ("SIGINT", "SIGTERM") else set()
    problems += [] if code in right else [f"exit code {code}, not {' or '.join(map(str, sorted(right)))}"]
    return str(code), problems


def _alive(mark: str) -> list[int]:
    word = f"PARTC_EARLY={mark}".encode()
    every = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in every if word in read(pid, "environ") and states([pid])[0] not in ("", "Z", "X")]


def table(rows: Sequence[tuple[str, str, Outcome]]) -> str:
    """A line for each command and signal: cases by outcome, how many are wrong, and the seconds of the longest end."""
    words = sorted({outcome.word for _, _, outcome in rows})
    lines = [f"{'command':12} {'signal':8}" + "".join(f"{word:>9}" for word in words) + f"{'wrong':>7} {'max s':>6}"]
    for command, name in sorted({row[:2] for row in rows}):
        mine = [outcome for one, other, outcome in rows if (one, other) == (command, name)]
        counts = Counter(outcome.word for outcome in mine)
        wrong, longest = sum(bool(outcome.problems) for outcome in mine), max(outcome.seconds for outcome in mine)
        lines.append(
            f"{command:12} {name:8}" + "".join(f"{counts[word]:9}" for word in words) + f"{wrong:7} {longest:6.1f}"
        )
    total = Counter(outcome.word for _, _, outcome in rows)
    wrong = sum(bool(outcome.problems) for _, _, outcome in rows)
    return "\n".join([*lines, f"{len(rows)} signals, {wrong} wrong; {dict(sorted(total.items()))}"])


def main() -> int:
    """The exit code: 1 where a command has not ended as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=10.0, help="the latest moment, in seconds after the start")
    parser.add_argument("--only", default=",".join(FIRST), help=f"of {', '.join(COMMANDS)}")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    given = parser.parse_args()
    for name in SIGNALS:  # a shell may start this script with some ignored, which its commands would inherit
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    random, commands = Random(given.seed), given.only.split(",")
    with tempfile.TemporaryDirectory(prefix="early-") as name:
        place = Path(name)
        (place / "files").mkdir()
        prepare(place / "files")
        spans = {
            command: given.within
            if command.startswith(_ENDLESS)
            else min(given.within, 1.3 * _seconds(command, place, given.within))
            for command in commands
        }
        print("moments: " + ", ".join(f"{command} 0 to {span:.1f} s" for command, span in spans.items()), flush=True)
        cases = []
        for number in range(given.count):
            command = commands[number % len(commands)]
            cases.append((command, random.choice(SIGNALS), random.uniform(0, spans[command]), place / f"case_{number}"))
        rows = []
        with ThreadPoolExecutor(given.jobs) as pool:
            results = pool.map(lambda case: outcome(case[0], case[1], case[2], place / "files", case[3]), cases)
            for (command, signal_name, delay, _), found in zip(cases, results, strict=True):
                rows.append((command, signal_name, found))
                if found.problems:
                    print(
                        f"WRONG {signal_name} to {command} after {delay:.2f} s: {'; '.join(found.problems)}", flush=True
                    )
    print(table(rows))
    return int(any(found.problems for _, _, found in rows))


def _seconds(command: str, place: Path, most: float) -> float:
    """How long the command runs undisturbed, at most so long."""
    begun = time.monotonic()
    outcome(command, "SIGKILL", 0.0, place / "files", place / f"warm {command}")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "partc.cli", *COMMANDS[command]],
        cwd=place / f"warm {command}",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    begun = time.monotonic()
    try:
        process.wait(most)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    return time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
