"""A rank of `trace_cost.py`: steps of two programs of one artifact in turns, of which one records the times of its actions.

    mpiexec -n 2 python trace_cost_rank.py FOLDER '{"batch": 64}' TURNS STEPS

A third program, which records nothing either, shows what turns differ by on their own. Prints by program and turn the seconds of a step by
the clock and by the processors of all ranks, how many actions a step has, and the most that a recorded action took over a bare one.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from pathlib import Path

from mpi4py import MPI
from partc.cli.job.inputs import open_inputs
from partc.cli.job.profile import measured
from partc.runtime import Trainer, load_trainer
from partc.runtime.artifact.trace import trace_text
from partc.runtime.communication.collective import nothing
from partc.runtime.execution.inputs import shard
from partc.runtime.execution.step_plan import StepPlan
from partc.runtime.execution.times.profiler import Profiler

OFF, ON, AGAIN = "off", "on", "again"
_WARM, _EMPTY, _ROUNDS = 5, 200, 50


def recording(plan: StepPlan) -> float:
    """Seconds of a processor in which the actions of a step plan are recorded, when they do nothing."""
    bare, watched = copy.copy(plan), copy.copy(plan)
    for one in (bare, watched):
        one.actions = [(index, nothing) for index, _ in plan.actions]
    Profiler(0).add([watched])
    times: dict[str, list[float]] = {OFF: [], ON: []}
    for _ in range(_ROUNDS):
        for name, one in ((OFF, bare), (ON, watched)):
            calls = [action for _, action in one.actions]
            begin = time.process_time()
            for _ in range(_EMPTY):
                for call in calls:
                    call()
            times[name].append((time.process_time() - begin) / _EMPTY)
    return statistics.median(times[ON]) - statistics.median(times[OFF])


def main() -> None:
    folder, sizes, turns, steps = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    comm = MPI.COMM_WORLD
    with (
        load_trainer(folder / "build", comm, threads=1) as off,
        load_trainer(folder / "build", comm, threads=1) as on,
        load_trainer(folder / "build", comm, threads=1) as again,
    ):
        sides: dict[str, Trainer] = {OFF: off, ON: on, AGAIN: again}
        manifest = off.program.manifest
        assert manifest.training is not None
        ports = [port for port in off.program.inputs if port.name not in manifest.training.scalars]
        whole = open_inputs(manifest, [], 7, sizes).read([port.name for port in ports])
        batch = {port.name: shard(port, comm.rank, whole[port.name]) for port in ports}
        profiler = on.program.record_times()

        def turn(side: Trainer, count: int) -> tuple[float, float]:
            """Seconds of a step by the clock, and by the processors of all ranks."""
            comm.Barrier()
            begin, work = time.perf_counter(), time.process_time()
            for _ in range(count):
                side.train(batch)
            took, worked = time.perf_counter() - begin, time.process_time() - work
            comm.Barrier()
            return comm.allreduce(took, MPI.MAX) / count, comm.allreduce(worked) / count

        for side in sides.values():
            turn(side, _WARM)
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for number in range(turns):
            order = [*sides][number % 3 :] + [*sides][: number % 3]
            for name in order:
                rows[name].append(turn(sides[name], steps))
        text = measured(profiler, "x.trace.json")
        texts = on.program.all_gather_text(text)
        (plan,) = off.program._schedules.values()
        actions = comm.allgather(len(plan.actions))
        recorded = comm.allgather(recording(plan) if plan.actions else 0.0)
        if comm.rank == 0:
            (folder / "x.trace.json").write_text(trace_text(texts))
            print(json.dumps({"rows": rows, "actions": actions, "recorded": recorded}), flush=True)


if __name__ == "__main__":
    main()
