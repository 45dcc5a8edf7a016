"""A Llama of 70B before its weights are there: CPU seconds and peak memory of each command, for generation and for training.

    python tests/benchmarks/real_size/before_weights.py [--layers 80] [--tp 8] [--stages 8] [--microbatches 8] [--files FOLDER]
        [--kinds generate,train]

Writes a `config.json` of the width of Llama-3-70B and nothing else. `plan`, `compile --no-weights`, `check`, `inspect` and `simulate`
work from it: a step on a machine of 50 TFLOP/s and 100 GB/s. The last line has the seconds of all commands and the largest peak.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from large_folder import measured, write_configuration

MACHINE = """machine: 1
cores: 0
targets:
  cpu:
    session: 20us
    step: 200us
    products: {matmul: {1 MFLOP: 2us, 1 TFLOP: 20ms}, convolution: {1 MFLOP: 4us, 1 TFLOP: 30ms}}
    kernels: {elementwise: {4KiB: 2us, 1GiB: 1ms}}
links:
  - {name: default, ranks: 2, stride: 1, overlap: 1.0, wake: 2us, send: {1KiB: 5us, 1GiB: 10ms}, all_reduce: {1KiB: 10us, 1GiB: 12ms}}
"""
TRAIN = """
pipeline: {microbatches: COUNT, schedule: 1f1b}

train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}
  optimizer: {type: adamw, lr: 0.0001}
  batch: COUNT
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 80), ("tp", 8), ("stages", 8), ("microbatches", 8), ("length", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", default="generate,train")
    parser.add_argument("--files", type=Path)
    options = parser.parse_args()
    root = options.files or Path(tempfile.mkdtemp())
    os.environ["PARTC_CACHE"] = str(root / "cache")
    model, machine = root / "llama", root / "machine.yaml"
    write_configuration(model, options.layers)
    machine.write_text(MACHINE)
    cut = ["--tp", str(options.tp), "--stages", str(options.stages)]
    found = list[tuple[float, float]]()
    for kind in options.kinds.split(","):
        plan, build = root / f"{kind}.yaml", root / kind
        plan.unlink(missing_ok=True)
        made = ["--generate", str(options.length)] if kind == "generate" else []
        found.append(measured(f"{kind}: plan", "plan", str(model), *cut, *made, "-q", "-o", str(plan)))
        if kind == "train":
            with plan.open("a") as file:
                file.write(TRAIN.replace("COUNT", str(options.microbatches)))
        written = ["compile", str(model), "--plan", str(plan), "--no-weights", "-q", "-o", str(build)]
        found.append(measured(f"{kind}: compile", *written))
        found += [measured(f"{kind}: {command}", command, str(build)) for command in ("check", "inspect")]
        sizes = ["--set", f"sequence={options.length}"] if kind == "train" else []
        found.append(measured(f"{kind}: simulate", "simulate", str(build), "--machine", str(machine), *sizes))
    seconds, peak = sum(one for one, _ in found), max(one for _, one in found)
    print(f"{'all':24} {seconds:8.1f} s {peak:8,.0f} MiB at most")
    if options.files is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
