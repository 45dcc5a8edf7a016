"""Small AllReduces in shared memory: many rounds of many sizes are right on every rank, and a variable switches them off."""

from __future__ import annotations

import os
import subprocess
import sys

from test_mpi_ranks import MPIEXEC

SCRIPT = """
import os, random, sys
import numpy as np
from mpi4py import MPI
from partc.runtime.artifact.dtypes import BY_NAME
from partc.runtime.communication.mpi import MpiTransport
from partc.runtime.communication.shared_memory import ShmBarrier
from partc.runtime.communication.transport import CollectiveArgs

rounds = int(sys.argv[1])
transport = MpiTransport(MPI.COMM_WORLD)
rank, ranks = transport.rank, tuple(range(transport.size))
transport.create_groups([ranks])
shared = isinstance(transport._groups[ranks].arrivals, ShmBarrier)
alike, own = random.Random(1), random.Random(rank)
bound = []
for size in (1, 7, 513, 4095, 4096):  # in place and not, of 8 bytes an element
    for kept in (False, True):
        source = np.zeros(size, np.int64)
        target = source if kept else np.zeros(size, np.int64)
        for reduce in ("sum", "max"):
            args = CollectiveArgs("AllReduce", ranks, 1, source.view(np.uint8), target.view(np.uint8), BY_NAME["int64"], reduce, 0, True)
            bound.append((source, target, reduce, transport.prepare(args)))
for turn in range(rounds):
    source, target, reduce, begin = bound[alike.randrange(len(bound))]
    source[:] = np.arange(source.size) + turn * (rank + 1)
    if own.random() < 0.05:  # ranks come at different times
        sum(range(own.randrange(20000)))
    request = begin()
    while not request.Test():  # without a sleep: what comes too early is seen
        os.sched_yield()
    ends = np.arange(source.size)
    wanted = len(ranks) * ends + turn * sum(1 + one for one in ranks) if reduce == "sum" else ends + turn * len(ranks)
    assert (target == wanted).all(), (rank, turn, reduce, target[:3], wanted[:3])
    target[:] = -1  # what is read too late is seen
transport.close()
if rank == 0:
    print("shared" if shared else "not shared", flush=True)
"""


def run(script: str, ranks: int, rounds: int) -> subprocess.CompletedProcess[str]:
    command = [str(MPIEXEC), "--oversubscribe", "-n", str(ranks), sys.executable, "-c", script, str(rounds)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **root})


def test_many_rounds_of_many_sizes_are_right_on_every_rank() -> None:
    result = run(SCRIPT, 2, 4000)
    assert result.stdout == "shared\n", result.stderr


def test_one_rank_switches_it_off_for_all() -> None:
    result = run(f"import os; os.environ['PARTC_SHARED_MEMORY'] = os.environ['OMPI_COMM_WORLD_RANK']\n{SCRIPT}", 2, 100)
    assert result.stdout == "not shared\n", result.stderr
