"""Searches for plans of a GPT's training on many ranks: CPU seconds and the found plan.

    python tests/benchmarks/search_large.py [--layers 48] [--width 768] [--batch 512] [--ranks 8,16,64,512] [--machine FILE]

Each search is a `partc plan` of its own, its start and the import of the model with it, on the machine that stands for one that is not
known: a device for each rank, links of 100 GB/s. Wanted: at most 10 s. CPU seconds do not depend on what else runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GPT = Path(__file__).parents[2] / "samples" / "gpt" / "model.py"
MODEL = """from model import GPT, Sizes, batch, inputs, outputs, seq
__all__ = ["batch", "inputs", "outputs", "seq"]
model = GPT(Sizes(layers={layers}, width={width}, heads={heads}, vocabulary=4096))
"""
TRAIN = """ranks: 1
train:
  loss: {{type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}}
  optimizer: {{type: adamw, lr: 0.001, weight_decay: 0.1}}
  batch: {batch}
"""


def searched(folder: Path, ranks: int, machine: list[str]) -> tuple[float, str]:
    """CPU seconds of a search, and its last line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["plan", "gpt.py", "--ranks", str(ranks), "--plan", "train.yaml", "--set", "seq=128", *machine]
    out = folder / f"{ranks}.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "partc.cli", *command, "-o", out.name], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = done.stdout.splitlines()
    plan = next(line for line in lines if line.endswith("found")).split("  ")[0]
    line = next(line for line in lines if line.startswith("found "))
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, f"{plan}: {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 48), ("width", 768), ("batch", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", default="8,16,64,512")
    parser.add_argument("--machine", type=Path)
    options = parser.parse_args()
    machine = [] if options.machine is None else ["--machine", str(options.machine.absolute())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(GPT, folder / "model.py")
        (folder / "gpt.py").write_text(
            MODEL.format(layers=options.layers, width=options.width, heads=options.width // 64)
        )
        (folder / "train.yaml").write_text(TRAIN.format(batch=options.batch))
        print(f"a GPT of {options.layers} layers of width {options.width}; load {os.getloadavg()[0]:.1f}", flush=True)
        for ranks in map(int, options.ranks.split(",")):
            cpu, found = searched(folder, ranks, machine)
            print(f"  {ranks:4} ranks {cpu:6.1f} s of CPU  {found}", flush=True)


if __name__ == "__main__":
    main()
