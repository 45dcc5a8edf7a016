"""Gradients in several messages against all in one: a data-parallel step of the large GPT on two MPI ranks, in turns.

    python tests/benchmarks/train_buckets.py [--model gpt768] [--sizes 1000 10 25] [--hosts]

The first size is larger than all gradients: one message, which is waited for as soon as it has begun. Others leave while the rest of
the backward pass runs. Prints medians, fastest steps and ratios to the first. The losses of all sizes are compared. With `--hosts` the
ranks are on two hosts, namespaces of this machine, with a link of `--gbit` and `--delay` milliseconds each way; beside the ratios
stands the time that the gradients' bytes take there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from train_cases import CASES, data_parallel, write
from train_data_parallel import RANKS, in_turns, partc_side
from two_hosts import two_hosts

CLOSE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt768", choices=CASES)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1000, 10, 25], help="bucket_mb of each side")
    parser.add_argument("--steps", type=int, default=3, help="of a side in a turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--batch", type=int, help="records of a rank")
    parser.add_argument("--hosts", action="store_true", help="over two hosts; needs root, and Linux's namespaces")
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--actions", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    case = CASES[options.model]
    if options.batch is not None:
        case = dataclasses.replace(case, sizes=case.sizes | {"batch": options.batch})
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(two_hosts(temporary, options.gbit, options.delay)) if options.hosts else None
        folders = [temporary / str(size) for size in options.sizes]
        for folder, size in zip(folders, options.sizes, strict=True):
            folder.mkdir()
            write(folder, case, data_parallel(RANKS, size), RANKS)
        sides = [partc_side(folder, RANKS, hosts=hosts) for folder in folders]
        in_turns(sides, options.steps, options.turns)
        print(f"{options.model} {case.sizes} on {RANKS} ranks on {os.cpu_count()} cores, one thread a rank; ms a step")
        if hosts is not None:
            with np.load(folders[0] / "weights.npz") as weights:
                sent = sum(weights[name].nbytes for name in weights)
            print(
                f"two hosts, {options.gbit:g} Gbit/s, {options.delay:g} ms each way ({hosts.link}): gradients of {sent / 1e6:.1f} MB"
                f" take {sent * 8e-6 / options.gbit:.1f} ms each way"
            )
        first = statistics.median(sides[0].times)
        losses = np.load(folders[0] / "partc.npy")
        for side, folder, size in zip(sides, folders, options.sizes, strict=True):
            middle = statistics.median(side.times)
            apart = np.abs(np.load(folder / "partc.npy") / losses - 1).max()
            assert apart < CLOSE, f"bucket_mb {size}: losses differ by {apart:.1e}"
            print(
                f"  bucket_mb {size:6g}: {1e3 * middle:9.3f}, fastest {1e3 * min(side.times):9.3f},"
                f" {middle / first:.3f} of the first",
                flush=True,
            )
        for side in sides:
            side.close()
        for folder, size in zip(folders, options.sizes, strict=True) if options.actions else ():
            watched = partc_side(folder, RANKS, "--actions", hosts=hosts)
            watched.turn(options.steps * options.turns)
            print(f"bucket_mb {size:g}\n{watched.close()}", flush=True)


if __name__ == "__main__":
    main()
