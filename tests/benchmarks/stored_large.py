"""A GPT of 1 billion parameters trained on two ranks with stored parameters, in an address space that data parallel does not fit.

    python tests/benchmarks/stored_large.py [--layers 20] [--width 2048] [--limit 7000] [--steps 2] [--only stored]

Both sides train the same model by SGD in float32 from the same random weights, one after the other, under `ulimit -v LIMIT` (MB) for each
process. A row has what `partc inspect` states before the run, what the largest rank had, and how the run ended.

    stated      the peak of a rank's memory by `partc inspect`, MB
    resident    the most memory of a rank with its libraries and mapped files, MB; virtual: the most address space
    end         the losses, or the last line that the run wrote

Half of the weights and half of the gradients are 4 bytes of memory for each parameter on a rank; mapped files of weights, which count in
the address space until they are read, 2 more. Data parallel needs twice that. Each side takes 4 bytes of disk for each parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

SAMPLE = Path(__file__).parents[2] / "samples/gpt/model.py"
RANKS, WORDS, LENGTH, BATCH = 2, 1024, 16, 2
MODEL = """from model import GPT, Sizes, batch, inputs, outputs, seq

__all__ = ["batch", "inputs", "outputs", "seq"]
model = GPT(Sizes(layers={layers}, width={width}, heads=16, vocabulary={words}, context={length}))
"""
PLAN = """ranks: {ranks}
mesh: {{dp: {ranks}}}
symbols: {{batch: {{divisor: {ranks}, max: {batch}}}, seq: {{max: {length}}}}}
dataset: {{ids: [dp, null], labels: [dp, null]}}
train:
  loss: {{type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}}
  optimizer: {{type: sgd, lr: 0.01}}
"""
SIDES = {"stored": 'parameters: {"**": {stored: dp}}\n', "data parallel": ""}


def called(folder: Path, *arguments: str) -> str:
    """Returns what a command of partc writes; the script ends where it fails."""
    asked = [sys.executable, "-P", "-m", "partc.cli", *arguments]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"partc {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def memory_below(process: int) -> tuple[int, int]:
    """Returns the most resident memory and address space, in kB, that a process below this one has had."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below, grown = {process}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in below} - below
        below, grown = below | more, bool(more)
    most = [0, 0]
    for child in below:
        try:
            status = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB$", Path(f"/proc/{child}/status").read_text(), re.MULTILINE))
        except OSError:
            continue
        most = [max(most[0], int(status.get("VmHWM", 0))), max(most[1], int(status.get("VmPeak", 0)))]
    return most[0], most[1]


def trained(folder: Path, limit: int, steps: int) -> tuple[tuple[int, int], float, str]:
    """Trains some steps under the limit, in MB; returns the most memory of a rank in kB, the seconds, and how it ended."""
    asked = [sys.executable, "-P", "-m", "partc.cli", "train", "build", "--data", "data.npz", "--batch", str(BATCH)]
    asked += ["--steps", str(steps), "--log", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    allow = partial(resource.setrlimit, resource.RLIMIT_AS, (limit * 10**6, limit * 10**6))
    most, begin = (0, 0), time.monotonic()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            asked, cwd=folder, env=environment, preexec_fn=allow, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            resident, virtual = memory_below(process.pid)
            most = max(most[0], resident), max(most[1], virtual)
            time.sleep(0.2)
    text = (folder / "output.txt").read_text().strip()
    losses = re.findall(r"loss ([\d.]+)", text)
    end = f"losses {', '.join(losses)}" if process.returncode == 0 else f"exit {process.returncode}: {text[-400:]}"
    return most, time.monotonic() - begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=7000, metavar="MB", help="address space of each process")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=SIDES)
    options = parser.parse_args()
    chance = np.random.default_rng(2)
    arrays: Mapping[str, np.ndarray] = {
        name: chance.integers(0, WORDS, (BATCH * options.steps, LENGTH)) for name in ("ids", "labels")
    }
    print(f"{'side':14} {'stated':>8} {'resident':>9} {'virtual':>9} {'seconds':>8}  end", flush=True)
    for name in [options.only] if options.only else SIDES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            shutil.copy(SAMPLE, folder)
            sizes = {"ranks": RANKS, "words": WORDS, "length": LENGTH, "batch": BATCH}
            (folder / "large.py").write_text(MODEL.format(layers=options.layers, width=options.width, **sizes))
            (folder / "plan.yaml").write_text(SIDES[name] + PLAN.format(**sizes))
            np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
            called(folder, "compile", "large.py", "--plan", "plan.yaml", "-o", "build")
            sizes_of = ("--set", f"batch={BATCH}", "--set", f"seq={LENGTH}")
            memory = json.loads(called(folder, "inspect", "build", "--json", *sizes_of))["memory"]
            stated = max(one["peak"] for one in memory)
            (resident, virtual), seconds, end = trained(folder, options.limit, options.steps)
        print(
            f"{name:14} {stated / 1e6:8.0f} {resident / 1e3:9.0f} {virtual / 1e3:9.0f} {seconds:8.0f}  {end}",
            flush=True,
        )


if __name__ == "__main__":
    main()
