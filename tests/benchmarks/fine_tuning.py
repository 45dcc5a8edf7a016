"""Fine-tuning of a small Llama by partc against transformers' own Trainer: the largest differences of losses and weights.

    python tests/benchmarks/fine_tuning.py [--steps 50]

Each plan takes half of the steps, and another one resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from finetuning_case import PLANS, FineTuning, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    half = steps // 2
    with tempfile.TemporaryDirectory() as folder:
        case = FineTuning(Path(folder), steps)
        losses, weights, _ = case.trainer()
        print(f"{'plan':12} {'steps':>9} {'loss':>9} {'weights':>9}   largest differences from the Trainer")
        for plan in PLANS:
            begun, there = case.partc(plan, half)
            print(
                f"{plan:12} {f'1-{half}':>9} {_largest(begun, losses[:half]):9.1e} {largest(there, weights[half]):9.1e}"
            )
        names = [*PLANS]
        for resumed, plan in zip(names, [*names[1:], names[0]], strict=True):
            rest, there = case.partc(plan, steps, resumed)
            said = f"{resumed} > {plan}"
            print(
                f"{said:12} {f'{half + 1}-{steps}':>9} {_largest(rest, losses[half:]):9.1e} {largest(there, weights[steps]):9.1e}"
            )


def _largest(have: list[float], want: list[float]) -> float:
    return float(np.abs(np.subtract(have, want)).max())


if __name__ == "__main__":
    main()
