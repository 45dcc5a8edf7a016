"""A table larger than a rank: trains it over MPI, and says how much memory each rank had at most, and how long it took.

    python tests/benchmarks/large_table.py --gigabytes 8 --ranks 4      the table, its checkpoint and going on from it take minutes

Rows are drawn from a seed by the rank that has them, pulled and pushed; nothing else of the table moves.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WIDTH, RECORDS = 64, 4096
MODEL = """
from partc.compiler import Input, nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding({rows}, {width}, init=nn.init.normal(0.01))
        self.out = nn.Linear(4 * {width}, 3)

    def forward(self, op, ids):
        return {{"y": self.out(op, op.Reshape(self.table(op, ids), op.Constant(value_ints=[0, -1])))}}

model, inputs = Net(), {{"ids": Input(["batch", 4], "int64")}}
"""
PLAN = """
ranks: {ranks}
symbols: {{batch: {{divisor: {ranks}, max: 512}}}}
dataset: data_parallel
sharding: {{table: pull}}
train:
  loss: {{type: softmax_cross_entropy, logits: y, labels: label}}
  optimizer: {{type: sgd, lr: 0.1}}
  data: data.npz
  batch: 512
"""
PARTC = [sys.executable, "-m", "partc.cli"]


def processes_below(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for child in task.read_text().split() for each in processes_below(int(child))]
        except OSError:
            continue
    return found


def peaks(command: list[str], folder: Path) -> list[int]:
    """Runs a command; the most resident memory of each process below it, in MiB, the largest first."""
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job, most = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL), dict[int, int]()
    while job.poll() is None:
        for pid in processes_below(job.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if found := re.search(r"VmHWM:\s+(\d+)", status):
                most[pid] = int(found[1]) // 1024
        time.sleep(0.05)
    if job.returncode:
        raise SystemExit(job.returncode)
    return sorted(most.values(), reverse=True)


def main() -> None:
    """Compiles, trains, saves, and goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--checkpoint", action="store_true", help="also save, and go on from there")
    given = parser.parse_args()
    rows = int(given.gigabytes * 1e9 / 4 / WIDTH) // given.ranks * given.ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL.format(rows=rows, width=WIDTH))
        (folder / "plan.yaml").write_text(PLAN.format(ranks=given.ranks))
        random = np.random.default_rng(0)
        ids = np.minimum(random.zipf(1.2, (RECORDS, 4)) * 977 % rows, rows - 1)
        np.savez(folder / "data.npz", ids=ids, label=random.integers(0, 3, RECORDS))
        train = [*PARTC, "train", "build", "--plan", "plan.yaml"]
        kept = ["--checkpoint", "kept"]
        runs = [
            ("compile", [*PARTC, "compile", "model.py", "--plan", "plan.yaml"]),
            ("train", [*train, "--steps", "4"]),
        ]
        if given.checkpoint:
            runs += [("save", [*train, "--steps", "4", *kept]), ("go on", [*train, "--steps", "6", *kept, "--resume"])]
        print(f"a table of {rows:,} x {WIDTH}, {rows * WIDTH * 4 / 1e9:.2f} GB, over {given.ranks} ranks")
        for what, command in runs:
            begun = time.perf_counter()
            most = peaks(command, folder)[: 1 if what == "compile" else given.ranks]
            shown = ", ".join(f"{one:,}" for one in most)
            print(f"{what:8} {time.perf_counter() - begun:6.1f} s   MiB at most: {shown}", flush=True)


if __name__ == "__main__":
    main()
