"""LeNet's training placed over five MPI ranks, a layer each, against PyTorch on one thread: an epoch of steps of batch 32, in turns.

    python tests/benchmarks/train_lenet_placed.py [--batch 32] [--records 16000]

The placement is that of the sample. A step is forward, backward and SGD with momentum from the batch in hand; the five ranks share
the cores of the machine and no two work at once but for what is off the path. Prints the seconds of an epoch by the median of the turns,
and the ratio (at most 1.5 wanted). The interpreter has torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from train_cases import CASES, train, write
from train_data_parallel import in_turns, largest_difference, partc_side, print_actions, torch_side

PLACEMENT = {"conv1": 3, "conv2": 4, "fc1": 0, "fc2": 1, "fc3": 2}
RANKS = 5
WANTED = 1.5


def batched(times: list[float], count: int) -> Iterator[list[float]]:
    """So many times together."""
    return (times[at : at + count] for at in range(0, len(times), count))


def placed() -> str:
    """The plan of the sample."""
    rows = "".join(f"  {name}: {rank}\n" for name, rank in PLACEMENT.items())
    return f"ranks: {RANKS}\nplacement:\n{rows}{train()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--records", type=int, default=16000, help="of an epoch")
    parser.add_argument("--steps", type=int, default=25, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--actions", action="store_true", help="print where partc's time goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, replace(CASES["lenet"], sizes={"batch": options.batch}), placed(), 1)
        sides = [partc_side(folder, RANKS), torch_side(folder, "lenet", 1)]
        in_turns(sides, options.steps, options.turns)
        # Rank 0 is done before others are: only many steps together tell what one takes.
        rounds = [[statistics.mean(row) for row in batched(side.times, options.steps)] for side in sides]
        own, other = (statistics.median(row) for row in rounds)
        best = [min(row) for row in rounds]
        count = options.records // options.batch
        print(
            f"LeNet, batch {options.batch}, {count} steps an epoch: partc on {RANKS} ranks on {os.cpu_count()} cores"
            f" {own * count:.3f} s ({1e3 * own:.3f} ms a step), PyTorch on one thread {other * count:.3f} s"
            f" ({1e3 * other:.3f} ms), ratio {own / other:.3f} (at most {WANTED} wanted)"
        )
        print(
            f"fastest turns {1e3 * best[0]:.3f} and {1e3 * best[1]:.3f} ms, ratio {best[0] / best[1]:.3f};"
            f" first losses differ by {largest_difference(folder):.1e}",
            flush=True,
        )
        for side in sides:
            side.close()
        if options.actions:
            print_actions(folder, RANKS, options.steps * options.turns)


if __name__ == "__main__":
    main()
