"""An artifact that trains, under MPI, measured in turns on rank 0; started by the benchmarks.

    mpiexec -n 2 python train_partc.py FOLDER       the artifact FOLDER/build on the records of FOLDER/feeds_<rank>.npz

With `--actions` the time of every step of the rank's program is added up, and printed at the end by kind and one by one. With
`--memory` the memory of rank 0 is reported. The losses of the first steps go to FOLDER/partc.npy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI
from partc.runtime import load_trainer
from partc.runtime.program.steps import Segment, Update, WaitCollective, WaitRecv
from partc.runtime.training.trainer import Trainer
from train_cases import feeds
from train_memory_report import Memory
from transformer_partc import told_all
from turns import serve

FIRST = 3


class Clock:
    """Adds up the time of every step of a rank's program; reaches into its schedules, which no user does."""

    def __init__(self, trainer: Trainer) -> None:
        self.program = trainer.program
        self.spent: dict[int, float] = {}
        self.total = 0.0
        self.steps = 0
        for schedule in self.program._schedules.values():
            schedule.actions[:] = [(index, self._timed(index, action)) for index, action in schedule.actions]

    def _timed(self, index: int, action: Callable[[], object]) -> Callable[[], object]:
        def timed() -> None:
            start = time.perf_counter()
            action()
            self.spent[index] = self.spent.get(index, 0.0) + time.perf_counter() - start

        return timed

    def said(self) -> str:
        """Milliseconds a step, by kind and by step of the program."""
        steps = self.program._program.steps
        kinds = {"compute": (Segment,), "update": (Update,), "waits": (WaitCollective, WaitRecv)}
        each = {index: 1e3 * seconds / max(self.steps, 1) for index, seconds in sorted(self.spent.items())}
        total = 1e3 * self.total / max(self.steps, 1)
        of = {name: sum(ms for i, ms in each.items() if isinstance(steps[i], kind)) for name, kind in kinds.items()}
        of["begins"] = sum(each.values()) - sum(of.values())
        of["around"] = total - sum(each.values())
        parts = ", ".join(f"{name} {ms:.3f} ({ms / max(total, 1e-9):.1%})" for name, ms in of.items())
        rows = [f"  {ms:8.3f} ms  {type(steps[i]).__name__:7} {steps[i]}" for i, ms in each.items()]
        return "\n".join([f"rank {self.program.rank}: {total:.3f} ms a step: {parts}", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--actions", action="store_true")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    memory = Memory()
    with load_trainer(options.folder / "build", comm, threads=1) as trainer:
        wanted = {port.name for port in trainer.inputs}
        mine = feeds(options.folder, comm.rank if trainer.ports[0].boxes else 0) if wanted else {}
        batch = {name: array for name, array in mine.items() if name in wanted}
        losses = [trainer.train(batch).get("loss") for _ in range(FIRST)]
        found = [row for row in comm.gather(losses) or [] if row[0] is not None]
        if comm.rank == 0:
            np.save(options.folder / "partc.npy", np.array(found[0], float))
        memory.note("first steps")
        clock = Clock(trainer) if options.actions else None

        def step() -> None:
            if clock is None:
                trainer.train(batch)
                return
            start = time.perf_counter()
            trainer.train(batch)
            clock.total += time.perf_counter() - start
            clock.steps += 1

        serve(step, told_all(comm), comm.rank == 0)
        if clock is not None:
            texts = comm.gather(clock.said())
            if texts:
                print("\n".join(texts), flush=True)
        if options.memory and comm.rank == 0:
            print(memory.said(), flush=True)


if __name__ == "__main__":
    main()
