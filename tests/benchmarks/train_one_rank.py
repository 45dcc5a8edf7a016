"""Loss and gradients on one rank against PyTorch eager, one thread each, in turns: `python train_one_rank.py [MODEL...]`.

Prints the medians of both and their ratio, and beside it the ratio that is aimed at. The numbers of both sides are compared first.
The interpreter has torch; parameters stay as they are, so that every step is the same work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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


def measured(model: Model, sizes: dict[str, int], seconds: float, profile: str) -> tuple[float, float, int]:
    """The medians of PyTorch and partc in ms, and the number of nodes."""
    feeds = model.feeds(np.random.default_rng(0), **sizes)
    step = Step(model, profile)
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
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    if profile:
        print(step.session.end_profiling())
    eager, own = (statistics.median(times) * 1e3 for _, times in sides)
    return eager, own, len(step.proto.graph.node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=5, help="about how long a model is measured")
    parser.add_argument("--profile", default="", help="the beginning of the names of onnxruntime's profiles")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in CASES]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    print(f"{'model':8} {'nodes':>6} {'PyTorch ms':>11} {'partc ms':>9} {'ratio':>6} {'aim':>5}")
    for name in options.models or CASES:
        make, sizes, aim = CASES[name]
        eager, own, nodes = measured(make(), sizes, options.seconds, options.profile)
        print(f"{name:8} {nodes:6} {eager:11.3f} {own:9.3f} {own / eager:6.2f} {aim:5.2f}", flush=True)


if __name__ == "__main__":
    main()
