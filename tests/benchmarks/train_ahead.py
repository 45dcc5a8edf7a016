"""A pipeline that trains, with and without the agreement on a step begun during the step before, in turns in one job of two MPI ranks.

    python tests/benchmarks/train_ahead.py [--schedule zb_h1] [--layers 4 --width 256 --batch 8 --seq 64] [--transport tcp]

Prints medians: milliseconds of a step on rank 0, the share of it that each rank waits, and how much of that for agreements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from train_pipeline import case_of, plan

ROWS = ("alone", "ahead")


def rank(folder: Path, steps: int, turns: int) -> None:
    """One rank of the job."""
    from mpi4py import MPI
    from partc.runtime import load_trainer
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.transport import AGREEMENT, Request
    from train_cases import feeds

    comm = MPI.COMM_WORLD
    transport = MpiTransport(comm)
    waited = dict.fromkeys(("agreements", "values"), 0.0)
    wait = transport.wait

    def timed(request: Request, what: Callable[[], str]) -> None:
        begun = time.perf_counter()
        wait(request, what)
        waited["agreements" if what() == AGREEMENT else "values"] += time.perf_counter() - begun

    transport.wait = timed  # type: ignore[method-assign]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ROWS}
    with load_trainer(folder / "build", transport, threads=1) as trainer:
        wanted = {port.name for port in trainer.inputs}
        batch = {name: array for name, array in feeds(folder, 0).items() if name in wanted}
        for turn in range(2 * turns + 2):
            name = ROWS[turn % 2]
            comm.Barrier()
            for step in range(steps):
                waited.update(dict.fromkeys(waited, 0.0))
                begun = time.perf_counter()
                trainer.train(batch, batch if name == "ahead" and step < steps - 1 else None)
                if step and turn > 1:
                    found[name].append((time.perf_counter() - begun, waited["agreements"], waited["values"]))
    every = comm.gather(found)
    for name in ROWS if every else ():
        assert every
        times = statistics.median(row[0] for row in every[0][name])
        least = min(row[0] for row in every[0][name])
        shares = []
        for number, of_rank in enumerate(every):
            idle = statistics.median((agreeing + values) / step for step, agreeing, values in of_rank[name])
            agreeing = statistics.median(row[1] for row in of_rank[name])
            shares.append(f"rank {number} waits {idle:.1%}, {1e3 * agreeing:.3f} ms for agreements")
        print(f"{name}: {1e3 * times:8.3f} ms a step, fastest {1e3 * least:8.3f}; {'; '.join(shares)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("layers", 4), ("width", 256), ("heads", 8), ("vocabulary", 1000), ("batch", 8), ("seq", 64)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--transport", default="sm", help="of Open MPI: tcp or sm")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps, options.turns)
        return
    from train_cases import write
    from transformer import ROOT, mpi_command

    with tempfile.TemporaryDirectory() as place:
        write(Path(place), case_of(options), plan(options.layers, 2, options.microbatches, options.schedule), 1)
        print(f"{options.schedule}, load average {os.getloadavg()[0]:.1f}, {options.transport}", flush=True)
        numbers = ["--steps", str(options.steps), "--turns", str(options.turns)]
        command = mpi_command(2, __file__, "--rank", place, *numbers)
        subprocess.run(command, env={**os.environ, **ROOT, "OMPI_MCA_btl": f"self,{options.transport}"}, check=True)


if __name__ == "__main__":
    sys.exit(main())
