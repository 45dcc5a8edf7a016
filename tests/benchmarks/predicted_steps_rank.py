"""A rank of `predicted_steps.py`: steps of an artifact in turns, with what other processes had of the cores; a trace at the end.

    mpiexec -n 2 python predicted_steps_rank.py FOLDER '{"batch": 64}' TURNS

Prints by turn the seconds of its steps, each from when all ranks have come to it to when the last has ended it; `others`, the share; and
`work`, the seconds of a step in which the rank that works most had a core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mpi4py import MPI
from partc.cli.job.inputs import open_inputs
from partc.cli.job.profile import measured
from partc.runtime import load, load_trainer, open_artifact
from partc.runtime.artifact.trace import trace_text
from partc.runtime.execution.inputs import shard

_LEAST, _SECONDS, _WARM = 5, 0.25, 5
_TICK = os.sysconf("SC_CLK_TCK")


def busy() -> float:
    """Seconds that the cores have worked since the start of the machine, for all processes."""
    with open("/proc/stat") as stat:
        numbers = [int(one) for one in stat.readline().split()[1:]]
    return (sum(numbers[:8]) - numbers[3] - numbers[4]) / _TICK


def own() -> float:
    """Seconds that this process has worked."""
    times = os.times()
    return times.user + times.system


def main() -> None:
    folder, sizes, turns = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    comm = MPI.COMM_WORLD
    artifact = open_artifact(folder / "build", trust=True)
    manifest = artifact.manifest
    trains = manifest.training is not None
    opened = load_trainer(folder / "build", comm, threads=1) if trains else load(folder / "build", comm, threads=1)
    with opened as one:
        program = one.program if trains else one
        scalars = {*manifest.training.scalars} if trains else set()
        ports = [port for port in manifest.inputs if comm.rank in port.ranks and port.name not in scalars]
        inputs = open_inputs(manifest, [], 7, sizes)
        whole = inputs.read([port.name for port in ports])
        batch = {port.name: shard(port, comm.rank, whole[port.name]) for port in ports}

        def step() -> float:
            comm.Barrier()
            begin = time.perf_counter()
            one.train(batch) if trains else one(**batch)
            return time.perf_counter() - begin

        first = comm.allreduce(sum(step() for _ in range(_WARM)) / _WARM, MPI.MAX)
        steps = max(_LEAST, round(_SECONDS / first))
        rows = []
        for _ in range(turns):
            comm.Barrier()
            worked, mine, work, begin = busy(), own(), time.process_time(), time.perf_counter()
            times = [step() for _ in range(steps)]
            clock = time.perf_counter() - begin
            most = comm.allreduce((time.process_time() - work) / steps, MPI.MAX)
            spent = comm.allreduce(own() - mine)
            slowest = [max(some) for some in zip(*comm.allgather(times), strict=True)]
            others = max(0.0, busy() - worked - spent) / clock / (os.cpu_count() or 1)
            rows.append({"steps": slowest, "others": others, "work": most})
        profiler = program.record_times()
        for _ in range(30):
            step()
        texts = program.all_gather_text(measured(profiler, "x.trace.json"))
        if comm.rank == 0:
            (folder / "x.trace.json").write_text(trace_text(texts))
            print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
