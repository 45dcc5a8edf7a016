"""The steps of a pipeline's ranks, timed action by action under MPI; started by `train_pipeline.py`.

    mpiexec -n 2 python train_pipeline_times.py FOLDER      writes FOLDER/times_<rank>.json at the end

Per rank: `walls`, the seconds of each step, which all ranks begin together; `actions`, in order what each is (`compute`, `update`, `wait`
or `begin` of communication), the task that it is of, and its seconds in each step; `arena`, the bytes planned for values
between segments; `peak`, the most resident memory in MB beyond what the process had before the artifact was loaded.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI
from partc.runtime import load_trainer
from partc.runtime.program.steps import Segment, Step, Update, WaitCollective, WaitRecv
from partc.runtime.training.trainer import Trainer
from train_cases import feeds
from train_memory_report import Memory
from transformer_partc import told_all
from turns import serve

FIRST = 3


class Recorder:
    """Keeps the time of every action of every step; reaches into the rank's program, which no user does."""

    def __init__(self, trainer: Trainer) -> None:
        self.program = trainer.program._program
        self.actions: list[dict[str, Any]] = []
        self.walls: list[float] = []
        for schedule in trainer.program._schedules.values():
            done: set[int] = set()
            for at, (index, action) in enumerate(schedule.actions):
                kept = self._kept(self.program.steps[index], index in done)
                self.actions.append(kept)
                done.add(index)
                schedule.actions[at] = index, _timed(action, kept["seconds"])

    def _kept(self, step: Step, again: bool) -> dict[str, Any]:
        """What is said of an action; a step that comes again is a wait for the send that it began."""
        task = step.task if isinstance(step, Segment) else ""
        kinds = {"compute": (Segment,), "update": (Update,), "wait": (WaitRecv, WaitCollective)}
        kind = next((name for name, types in kinds.items() if isinstance(step, types)), "wait" if again else "begin")
        return {"kind": kind, "task": task, "seconds": []}

    def said(self, memory: Memory) -> str:
        """All of it as JSON."""
        peak = json.loads(memory.said())["peak"]
        arena = int(self.program.memory.size)
        return json.dumps({"walls": self.walls, "actions": self.actions, "arena": arena, "peak": peak})


def _timed(action: Callable[[], object], seconds: list[float]) -> Callable[[], object]:
    def timed() -> None:
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    memory = Memory()
    with load_trainer(options.folder / "build", comm, threads=1) as trainer:
        wanted = {port.name for port in trainer.inputs}
        batch = {name: array for name, array in feeds(options.folder, 0).items() if name in wanted}
        for _ in range(FIRST):
            trainer.train(batch)
        recorder = Recorder(trainer)

        def step() -> None:
            comm.Barrier()
            start = time.perf_counter()
            trainer.train(batch)
            recorder.walls.append(time.perf_counter() - start)

        serve(step, told_all(comm), comm.rank == 0)
        (options.folder / f"times_{comm.rank}.json").write_text(recorder.said(memory))


if __name__ == "__main__":
    main()
