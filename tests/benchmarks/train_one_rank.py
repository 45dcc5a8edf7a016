"""A training step on one rank against PyTorch eager, one thread each, in turns.

    python tests/benchmarks/train_one_rank.py [MODEL...] [--kernels]

A step is forward, backward and the update by SGD with momentum, from the batch in hand to the loss in hand, by the runtime that
`partc train` uses. Prints medians and fastest steps of both, their ratio, the ratio that is aimed at, and the share of partc's
kernels that are matrix products and convolutions: where both sides do these at the core's peak, only the rest is there to be won.
The first losses of both are compared first. `--kernels` lists the time by op of both, and says of which time products are in each.
The interpreter has torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from train_cases import CASES, Case, data_parallel, write
from train_data_parallel import in_turns, largest_difference, partc_side, torch_side
from transformer import HERE

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from unsharded_gradient import Step

AIMS = {"mlp": 0.50, "lenet": 1.1, "gpt256": 0.55, "gpt768": 0.50, "resnet": 1.24, "dlrm": 0.35}
PRODUCTS = ("MatMul", "Gemm", "Conv")
TORCH_PRODUCTS = ("mm", "convolution", "conv2d")
LISTED = 12
"""Ops of a side that `--kernels` lists."""


def kernels(case: Case, steps: int = 9) -> dict[str, float]:
    """The ms of loss and gradients by op of the graph that onnxruntime made, the longest first."""
    model = case.model()
    with tempfile.TemporaryDirectory() as folder:
        step = Step(model, profile=f"{folder}/step")
        step.bind(model.feeds(np.random.default_rng(0), **case.sizes))
        for _ in range(steps):
            step()
        events = json.loads(Path(step.session.end_profiling()).read_text())
    runs: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"] / 1e3)
    spent: dict[str, float] = {}
    for (op_type, _), times in runs.items():
        spent[op_type] = spent.get(op_type, 0.0) + statistics.median(times)
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def torch_kernels(case: Case, name: str, steps: int = 9) -> dict[str, float]:
    """The ms of a step of PyTorch by op, the longest first; the update is in it."""
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary), case, data_parallel(1, loss=case.loss), 1)
        command = [sys.executable, str(HERE / "train_torch.py"), temporary, "--case", name, "--kernels", str(steps)]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    spent: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return spent


def measure(name: str, options: argparse.Namespace) -> None:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, case, data_parallel(1, loss=case.loss), 1)
        sides = [partc_side(folder, 1), torch_side(folder, name, 1, *["--fused"] * options.fused)]
        # As many steps as take about a quarter of a second, so that each side finds its caches as in a loop of its own.
        steps = max(5, int(0.25 / statistics.median(sides[1].turn(5))))
        in_turns(sides, steps, options.turns)
        own, other = (1e3 * statistics.median(side.times) for side in sides)
        best = [1e3 * min(side.times) for side in sides]
        apart = largest_difference(folder)
        for side in sides:
            side.close()
    spent = kernels(case)
    share = sum(ms for op, ms in spent.items() if any(one in op for one in PRODUCTS)) / sum(spent.values())
    print(
        f"{name:8} {own:9.3f} {other:9.3f} {own / other:7.3f} {AIMS[name]:7.2f}"
        f" {best[0]:11.3f} {best[1]:9.3f} {best[0] / best[1]:7.3f} {share:9.0%} {apart:11.1e}",
        flush=True,
    )
    if options.kernels:
        others = torch_kernels(case, name)
        for side, times, products in (("partc", spent, PRODUCTS), ("PyTorch", others, TORCH_PRODUCTS)):
            within = sum(ms for op, ms in times.items() if any(one in op for one in products))
            print(f"    {side}: products {within:.3f} ms, other kernels {sum(times.values()) - within:.3f} ms")
            for op_type, ms in list(times.items())[:LISTED]:
                print(f"        {ms:9.3f} ms  {op_type}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(AIMS))
    parser.add_argument("--turns", type=int, default=10, help="of each side")
    parser.add_argument("--fused", action="store_true", help="torch's SGD in one kernel, which is not its default")
    parser.add_argument("--kernels", action="store_true", help="list the time of every op")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in AIMS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(AIMS)}")
    print(
        f"{'model':8} {'partc':>9} {'PyTorch':>9} {'ratio':>7} {'aim':>7} {'fastest':>11} {'':9} {'ratio':>7}"
        f" {'products':>9} {'losses by':>11}"
    )
    for name in options.models or AIMS:
        measure(name, options)


if __name__ == "__main__":
    main()
