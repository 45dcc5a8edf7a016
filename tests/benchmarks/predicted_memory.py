"""The memory that `partc inspect` predicts of each rank against what each rank takes, for seven samples over MPI.

    python tests/benchmarks/predicted_memory.py [SAMPLE...]

Compiles each sample, runs some steps by `partc run` or `partc train` at fixed sizes, and prints by rank the predicted peak, the measured
one and their ratio. Ends with 1 if one is off by more than 20 %, and by more than 3 MB.

A rank's peak is measured as the growth of its own memory from just before it loads the artifact, when MPI has begun and onnxruntime has
run a session: anonymous pages, shared memory, and pages of the artifact's files. So it has weights, state, arenas, onnxruntime's sessions
with what they copy, Python's objects of nodes and steps, batches, outputs, and what MPI takes for these messages. It has not the
interpreter, libraries and pages of their code, or what a user's own source of data would import: data is in files of arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SAMPLES = HERE.parents[1] / "samples"
MOST = 0.2
LEAST = 3e6
"""Bytes by which any process may differ: what Python, MPI and threads take is nothing that a file says."""
MB = 1e6
HOOK = "import predicted_memory_rank\n"


@dataclass(frozen=True)
class Sample:
    """A sample's model and plan, the sizes at which it runs, what makes its data, and how many ranks there are."""

    model: str
    plan: str
    sizes: dict[str, int]
    data: Callable[[Path], list[str]]
    command: str = "train"


def _digits(folder: Path) -> list[str]:
    random = np.random.default_rng(7)
    np.savez(folder / "d.npz", x=random.random((2000, 1, 32, 32), np.float32), label=random.integers(0, 10, 2000))
    return ["--data", str(folder / "d.npz"), "--test", str(folder / "d.npz"), "--batch", "1000", "--evaluate", "2"]


def _tokens(folder: Path) -> list[str]:
    ids = np.random.default_rng(7).integers(0, 384, (64, 128))
    np.savez(folder / "d.npz", ids=ids, labels=ids)
    return ["--data", str(folder / "d.npz")]


def _clicks(folder: Path) -> list[str]:
    random, ids = np.random.default_rng(7), (8192, 26)
    arrays = {"numbers": random.random((8192, 13), np.float32), "clicked": np.ones((8192, 1), np.float32)}
    np.savez(folder / "d.npz", ids=random.integers(0, 4, ids), **arrays)
    return ["--data", str(folder / "d.npz"), "--test", str(folder / "d.npz"), "--batch", "4096", "--evaluate", "2"]


def _ids(folder: Path) -> list[str]:
    np.savez(folder / "d.npz", ids=np.random.default_rng(7).integers(0, 384, (16, 128)))
    return ["--input", str(folder / "d.npz")]


def _prompts(folder: Path) -> list[str]:
    """Two rounds of the four slots, whose sequences grow to the most tokens that a plan gives them."""
    prompts = (
        {"ids": [*range(1, 1 + length)], "max_tokens": 128 - length} for length in (3, 20, 50, 7, 100, 64, 120, 1)
    )
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
    return ["--prompts", str(folder / "prompts.jsonl")]


def _images(folder: Path) -> list[str]:
    np.savez(folder / "d.npz", x=np.random.default_rng(7).random((8, 3, 224, 224), np.float32))
    return ["--input", str(folder / "d.npz")]


TOKENS = {"batch": 16, "seq": 128}
CASES = {
    "lenet": Sample("lenet/model.py", "lenet/train.yaml", {"batch": 1000}, _digits),
    "gpt": Sample("gpt/model.py", "gpt/plan.yaml", TOKENS, _ids, command="run"),
    "gpt-train": Sample("gpt/model.py", "gpt/train.yaml", TOKENS, _tokens),
    "gpt-stages": Sample("gpt/model.py", "gpt/train_pipeline.yaml", TOKENS, _tokens),
    "gpt-generate": Sample("gpt/decoder.py", "gpt/generate.yaml", {}, _prompts, command="generate"),
    "wide-deep": Sample("wide_deep/model.py", "wide_deep/train.yaml", {"batch": 4096}, _clicks),
    "resnet": Sample("resnet/make_model.py", "resnet/plan.yaml", {"batch": 8}, _images, command="run"),
}


def main() -> int:
    """Prints a row for each rank; 1 if one is too far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="*", metavar="SAMPLE", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    if unknown := [name for name in options.samples if name not in CASES]:
        parser.error(f"no sample {', '.join(unknown)}; there are {', '.join(CASES)}")
    print(f"{'sample':10} {'rank':>4} {'predicted':>10} {'measured':>10} {'ratio':>6}   MB; of the prediction")
    wrong = 0
    for name in options.samples or CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows = measured_of(CASES[name], Path(folder), options.steps)
            for rank, (parts, measured) in enumerate(rows):
                ratio = parts["peak"] / measured
                wrong += abs(ratio - 1) > MOST and abs(parts["peak"] - measured) > LEAST
                told = ", ".join(f"{key} {size / MB:.1f}" for key, size in parts.items() if key != "peak" and size)
                print(
                    f"{name:10} {rank:4} {parts['peak'] / MB:10.1f} {measured / MB:10.1f} {ratio:6.2f}   {told}",
                    flush=True,
                )
        parts, measured = max(rows, key=lambda row: row[1])
        print(f"{name}: predicted / measured = {parts['peak'] / measured:.2f} of the largest rank", flush=True)
    print(f"{wrong} ranks are off by more than {MOST:.0%} and {LEAST / MB:.0f} MB")
    return int(wrong > 0)


def measured_of(sample: Sample, folder: Path, steps: int) -> list[tuple[dict[str, int], int]]:
    """By rank what `inspect` predicts, by part, and the measured peak."""
    build, out = folder / "build", folder / "measured"
    out.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    plan = SAMPLES / sample.plan
    partc("compile", str(SAMPLES / sample.model), "--plan", str(plan), "-o", str(build))
    sizes = [f"--set={name}={size}" for name, size in sample.sizes.items()]
    found = json.loads(partc("inspect", str(build), "--json", *sizes))
    path = os.pathsep.join([str(folder), str(HERE)])
    environment = {"PYTHONPATH": path, "MEASURED": str(out)}
    data = sample.data(folder)
    words = {
        "train": ["--plan", str(plan), "--steps", str(steps)],
        "run": ["--repeat", str(steps), "-o", str(folder / "outputs.npz")],
        "generate": [],
    }
    partc(sample.command, str(build), *words[sample.command], *data, environment=environment)
    rows = []
    for one in found["memory"]:
        (target,) = one["targets"]
        parts = {key: size for key, size in target.items() if isinstance(size, int)}
        rows.append((parts, int((out / f"{one['rank']}.txt").read_text())))
    return rows


def partc(*words: str, environment: dict[str, str] | None = None) -> str:
    """What a command prints; it must succeed."""
    command = [sys.executable, "-m", "partc.cli", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
