"""An artifact under MPI, measured in turns on rank 0; started by the benchmarks.

    mpiexec -n 2 python transformer_partc.py FOLDER                     the inputs of FOLDER/x.npy
    mpiexec -n 2 python transformer_partc.py FOLDER --batches 1,2,3     one step of each batch in turn, cut from x.npy

With `--shares` the time within sessions is added up in every step as well; at the end the rest is printed as a share of the
steps. With `--batches` a number N on stdin runs each batch N times before the next one, and the last of the N is counted.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from partc.runtime import load
from partc.runtime.execution.program import Program
from partc.runtime.program.steps import Segment
from turns import serve, told

_PAUSE = 0.01


def told_all(comm: MPI.Intracomm) -> Iterator[int]:
    """On every rank the numbers that rank 0 is told; ranks wait almost without using a core, and begin together."""
    numbers = told() if comm.rank == 0 else itertools.repeat(0)
    while True:
        number = np.array([next(numbers, -1)])
        arrived = comm.Ibarrier()
        while not arrived.Test():
            time.sleep(_PAUSE)
        comm.Bcast(number)
        comm.Barrier()
        if number[0] < 0:
            return
        yield int(number[0])


class Watched:
    """Adds up the time within sessions; reaches into the program's schedules, which no user does."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inside = 0.0
        self.total = 0.0
        self.seen: set[int] = set()

    def look(self) -> None:
        """Wraps what new schedules do in segments."""
        for schedule in self.program._schedules.values():
            if id(schedule) not in self.seen:
                self.seen.add(id(schedule))
                schedule.actions[:] = [
                    (index, self._timed(action) if isinstance(self.program._program.steps[index], Segment) else action)
                    for index, action in schedule.actions
                ]

    def _timed(self, action: Callable[[], object]) -> Callable[[], object]:
        @functools.wraps(getattr(action, "func", action))
        def timed() -> None:
            start = time.perf_counter()
            action()
            self.inside += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--batches", default="")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    x = np.load(options.folder / "x.npy")
    with load(str(options.folder / "build"), comm, threads=1) as program:
        if options.batches:
            batches = [int(text) for text in options.batches.split(",")]
            turning = itertools.cycle([np.ascontiguousarray(x[:batch]) for batch in batches])
            serve_batches(program, comm, turning, len(batches))
            return
        made: dict[str, Any] = program({"x": x})
        if comm.rank == 0:
            np.save(options.folder / "partc.npy", next(iter(made.values())))
        watched = Watched(program)
        if options.shares:
            watched.look()

        def step() -> None:
            start = time.perf_counter()
            program({"x": x})
            watched.total += time.perf_counter() - start

        serve(step, told_all(comm), comm.rank == 0)
        if options.shares:
            rows = comm.gather(1 - watched.inside / max(watched.total, 1e-9))
            if rows:
                print(
                    "share outside of sessions by rank: " + ", ".join(f"{100 * row:.1f} %" for row in rows), flush=True
                )


def serve_batches(program: Program, comm: MPI.Intracomm, inputs: Iterator[Any], count: int) -> None:
    """A number N runs every batch N times, one after the other; a step that is counted is the last of the N."""
    numbers = told_all(comm)
    if comm.rank == 0:
        print("@turn []", flush=True)
    for times in numbers:
        found = []
        for x in itertools.islice(inputs, count):
            for _ in range(times):
                start = time.perf_counter()
                program({"x": x})
                seconds = time.perf_counter() - start
            found.append(seconds)
        if comm.rank == 0:
            print(f"@turn {found}", flush=True)


if __name__ == "__main__":
    main()
