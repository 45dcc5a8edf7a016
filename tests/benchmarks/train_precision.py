"""The losses of networks in 16 bits against those in float32, step by step.

python tests/benchmarks/train_precision.py --steps 50
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from training_equivalence import Run, run, source_of
from training_models import Model, gpt, lenet, mlp

NETWORKS = {
    "mlp": (lambda: mlp(64, 32), {"batch": 8}),
    "lenet": (lenet, {"batch": 8}),
    "gpt": (lambda: gpt(width=32, layers=2, vocabulary=50), {"batch": 4, "seq": 8}),
}
TRAIN = "train: {loss: {type: softmax_cross_entropy, logits: y, labels: labels}, optimizer: {type: adamw, lr: 0.003}}\n"
PRECISIONS = {
    "float32": "",
    "float16, scale 1024": "precision: {compute: float16, loss_scale: 1024}\n",
    "float16, dynamic": "precision: {compute: float16, loss_scale: dynamic}\n",
    "bfloat16": "precision: {compute: bfloat16}\n",
}


def trained(one: Model, precision: str, steps: list[dict[str, np.ndarray]]) -> tuple[Run, float]:
    """What a network learns, and the time of its steps with the compile."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = run(source_of(one), f"ranks: 1\n{precision}{TRAIN}", Path(folder) / "build", steps)
    return found, time.perf_counter() - begun


def main() -> None:
    """Prints a line for each network and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    count = parser.parse_args().steps
    for name, (made, sizes) in NETWORKS.items():
        random, one = np.random.default_rng(1), made()
        batches = [one.feeds(random, **sizes) for _ in range(4)]
        steps = [batches[k % len(batches)] for k in range(count)]
        want: list[float] = []
        for kind, precision in PRECISIONS.items():
            found, seconds = trained(made(), precision, steps)
            losses = [float(outputs["loss"]) for outputs in found.outputs]
            want = want or losses
            far = max(abs(a - b) for a, b in zip(losses, want, strict=True))
            scale = found.after.get("loss_scale")
            more = "" if scale is None else f"   loss scale {scale:g}"
            print(
                f"{name:6} {kind:20} {losses[0]:.4f} -> {losses[-1]:.4f}   at most {far:.1e} from float32   {seconds:.1f} s{more}"
            )


if __name__ == "__main__":
    main()
