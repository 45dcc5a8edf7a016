"""A data-parallel step on two MPI ranks against PyTorch's DistributedDataParallel over gloo, one thread a rank, in turns.

    python tests/benchmarks/train_data_parallel.py [MODEL...] [--actions] [--busy 1]

A step is forward, backward, the sum of the gradients over the ranks and the update by SGD with momentum, from the batch in hand on
rank 0 to the loss in hand. Prints medians and fastest steps of both, their ratio, and what is wanted of it. The first losses of
both are compared first. `--busy` starts so many processes beside that compute without end. The interpreter has torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from partc.runtime.communication.mpi_calls import settings
from train_cases import CASES, data_parallel, write
from transformer import HERE, ROOT, mpi_command
from turns import Side, busy

sys.path.append(str(HERE.parent / "hosts"))

from two_hosts import TwoHosts

RANKS = 2
WANTED = {"mlp": 0.30, "lenet": 0.90, "gpt256": 0.50, "gpt768": 0.55}


def torch_side(folder: Path, case: str, ranks: int, *arguments: str) -> Side:
    """PyTorch on so many processes; alone it needs no others to talk to."""
    command = [sys.executable, str(HERE / "train_torch.py"), str(folder), "--case", case, *arguments]
    common = {"OMP_NUM_THREADS": "1"}
    if ranks > 1:
        common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return Side("torch", [command] * ranks, [common | {"RANK": str(rank)} for rank in range(ranks)])


def partc_side(folder: Path, ranks: int, *arguments: str, hosts: TwoHosts | None = None) -> Side:
    """The artifact in the folder under MPI, its ranks on this machine or on two hosts."""
    command = mpi_command(ranks, str(HERE / "train_partc.py"), str(folder), *arguments)
    if hosts is not None:
        command = hosts.over_both(command, ranks)
    # The script begins MPI itself; here it is begun as by `partc train`.
    return Side("partc", [command], [{**settings(5), **(ROOT if hosts is None else hosts.environment)}])


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def in_turns(sides: list[Side], steps: int, turns: int) -> None:
    """So many turns of so many steps each; the first turn and the first step of each are not counted."""
    for turn in range(turns + 1):
        for side in sides:
            times = side.turn(steps + 1)
            side.times += times[1:] if turn else []


def largest_difference(folder: Path) -> float:
    """Of the first losses of both sides, relative."""
    one, other = (np.load(folder / f"{name}.npy") for name in ("partc", "torch"))
    return float(np.abs(one / other - 1).max())


def print_actions(folder: Path, ranks: int, steps: int) -> None:
    """Where the time of each rank goes in so many steps, by steps of its program."""
    side = partc_side(folder, ranks, "--actions")
    side.turn(steps)
    print(side.close(), flush=True)


def measure(name: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, CASES[name], data_parallel(RANKS), RANKS)
        sides = [partc_side(folder, RANKS), torch_side(folder, name, RANKS, *["--fused"] * options.fused)]
        in_turns(sides, options.steps, options.turns)
        own, other = (1e3 * statistics.median(side.times) for side in sides)
        best = [1e3 * min(side.times) for side in sides]
        print(
            f"{name:8} {own:9.3f} {other:9.3f} {own / other:7.3f} {WANTED[name]:7.2f}"
            f" {best[0]:11.3f} {best[1]:9.3f} {best[0] / best[1]:7.3f} {largest_difference(folder):11.1e}",
            flush=True,
        )
        for side in sides:
            side.close()
        if options.actions:
            print_actions(folder, RANKS, options.steps * options.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(WANTED))
    parser.add_argument("--steps", type=int, default=10, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--fused", action="store_true", help="torch's SGD in one kernel, which is not its default")
    parser.add_argument("--actions", action="store_true", help="print where partc's time goes")
    parser.add_argument("--busy", type=int, default=0, help="so many processes beside that compute without end")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in WANTED]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(WANTED)}")
    print(f"{RANKS} ranks on {os.cpu_count()} cores, one thread a rank; ms a step")
    print(
        f"{'model':8} {'partc':>9} {'DDP':>9} {'ratio':>7} {'wanted':>7} {'fastest':>11} {'':9} {'ratio':>7} {'losses by':>11}"
    )
    with busy(options.busy):
        for name in options.models or WANTED:
            measure(name, options)


if __name__ == "__main__":
    main()
