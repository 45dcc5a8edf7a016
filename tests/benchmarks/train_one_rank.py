"""Loss and gradients on one rank against PyTorch eager, one thread each, in turns: `python train_one_rank.py [MODEL...]`.

Prints the medians of both and their ratio, beside it the ratio that is aimed at, and the share of partc's kernels that are matrix
products and convolutions: where both sides do these at the core's peak, only the rest is there to be won. Gradients are compared
first. A turn is several steps, so that each side finds its caches as in a loop of its own; times are those of the process, which
others on the machine disturb less. The interpreter has torch; parameters stay as they are: every step is the same work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from training_models import Model, dlrm, gpt, lenet, mlp, resnet
from training_torch import TorchStep
from whole_gradient import Step, same_gradients

CASES: dict[str, tuple[Callable[[], Model], dict[str, int], float]] = {
    "mlp": (mlp, {"batch": 64}, 0.50),
    "lenet": (lenet, {"batch": 64}, 1.1),
    "gpt256": (lambda: gpt(256, 2, heads=4, vocabulary=1000), {"batch": 4, "seq": 64}, 0.55),
    "gpt768": (lambda: gpt(768, 2, heads=12, vocabulary=1000), {"batch": 2, "seq": 128}, 0.50),
    "resnet": (resnet, {"batch": 4}, 1.24),
    "dlrm": (dlrm, {"batch": 128}, 0.35),
}


TURN = 0.1
PRODUCTS = ("MatMul", "Gemm", "Conv")


def measured(model: Model, sizes: dict[str, int], seconds: float) -> tuple[float, float, int]:
    """The medians of PyTorch and partc in ms, and the number of nodes."""
    feeds = model.feeds(np.random.default_rng(0), **sizes)
    step = Step(model)
    step.bind(feeds)
    other = TorchStep(model, step.parameters)
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    step()
    other(tensors)
    same_gradients(step.gradients, other.gradients, close=1e-4)
    sides: tuple[tuple[Callable[[], object], list[float]], ...] = ((lambda: other(tensors), []), (step, []))
    end = time.perf_counter() + seconds
    while len(sides[0][1]) < 9 or time.perf_counter() < end:
        for run, times in sides:
            # The first step of a turn finds the other side's numbers in the caches.
            run()
            over = time.perf_counter() + TURN
            while time.perf_counter() < over:
                begin = time.process_time()
                run()
                times.append(time.process_time() - begin)
    eager, own = (statistics.median(times) * 1e3 for _, times in sides)
    return eager, own, len(step.proto.graph.node)


def kernels(model: Model, sizes: dict[str, int], steps: int = 9) -> dict[str, float]:
    """The ms of a step by op of the graph that onnxruntime made, the longest first."""
    with tempfile.TemporaryDirectory() as folder:
        step = Step(model, profile=f"{folder}/step")
        step.bind(model.feeds(np.random.default_rng(0), **sizes))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=5, help="about how long a model is measured")
    parser.add_argument("--kernels", action="store_true", help="list the time of every op")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in CASES]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    print(f"{'model':8} {'nodes':>6} {'PyTorch ms':>11} {'partc ms':>9} {'ratio':>6} {'aim':>5} {'products':>9}")
    for name in options.models or CASES:
        make, sizes, aim = CASES[name]
        eager, own, nodes = measured(make(), sizes, options.seconds)
        spent = kernels(make(), sizes)
        share = sum(ms for op_type, ms in spent.items() if any(one in op_type for one in PRODUCTS)) / sum(
            spent.values()
        )
        print(f"{name:8} {nodes:6} {eager:11.3f} {own:9.3f} {own / eager:6.2f} {aim:5.2f} {share:9.0%}", flush=True)
        for op_type, ms in spent.items() if options.kernels else ():
            print(f"    {ms:9.3f} ms  {op_type}")


if __name__ == "__main__":
    main()
