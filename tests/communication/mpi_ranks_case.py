"""A job of real MPI ranks that run a script: its two programs, its folder, and its start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from artifact_text import write
from partc.runtime import describe_action
from partc.runtime.job.status_board import VARIABLE, create_board, read_board
from run_steps import give_lists

MPIEXEC = Path(sys.executable).parent / "mpiexec"
GRAPHS = [
    """rank0 (float[n, 3] x, int64[k] index) => (float[k, 3] y, string[k] t) <float[n, 3] h, float[k, 3] g>
    { h = Neg(x)
      = partc.comm.Send <peer = 1, tag = 0> (h)
      = partc.comm.Send <peer = 1, tag = 1> (index)
      g = partc.comm.Recv <peer = 2, tag = 3> ()
      t = partc.comm.Recv <peer = 2, tag = 4> ()
      y = Neg(g) }""",
    """rank1 () => () <float[n, 3] h, int64[k] index, float[k, 3] f>
    { h = partc.comm.Recv <peer = 0, tag = 0> ()
      index = partc.comm.Recv <peer = 0, tag = 1> ()
      f = Gather(h, index)
      = partc.comm.Send <peer = 2, tag = 2> (f) }""",
    """rank2 () => () <float[k, 3] f, float[k, 3] g, float[k] m, string[k] t, int64[1] axis = {1}>
    { f = partc.comm.Recv <peer = 1, tag = 2> ()
      g = Abs(f)
      = partc.comm.Send <peer = 0, tag = 3> (g)
      m = ReduceSum <keepdims = 0> (g, axis)
      t = Cast <to = 8> (m)
      = partc.comm.Send <peer = 0, tag = 4> (t) }""",
]
HEAD = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import partc.runtime as runtime
from partc.runtime.communication.mpi import MpiTransport
folder = sys.argv[1]
rank = MPI.COMM_WORLD.rank
x = np.arange(21, dtype=np.float32).reshape(7, 3)
good = {"x": x, "index": np.array([1, 6])}
bad = {"x": x, "index": np.array([1, 77])}
"""


REPORTS = """
import re
said, write = sys.argv[1] + "/said", sys.stderr.write
def keep(text):
    with open(said, "a") as file:
        file.write(text)
    return write(text)
sys.stderr.write = keep

def reported(*words):  # waits until ranks have told of their waits, by patterns
    while not os.path.exists(said) or not all(re.search(word, open(said).read()) for word in words):
        time.sleep(0.01)
"""
"""What a rank of a job runs first that other ranks wait for until their reports of it have come."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_lists(write(tmp_path_factory.mktemp("artifact"), GRAPHS))


def job(
    folder: Path, script: str, ranks: int = 3, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script on every rank."""
    command = [str(MPIEXEC), "--oversubscribe", "-n", str(ranks), sys.executable, "-c", HEAD + script, str(folder)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {**os.environ, **root, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)


_KILLED = """
transport = MpiTransport(MPI.COMM_WORLD)
isend, deadly = transport.isend, []
def perhaps(*rest):
    if deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return isend(*rest)
transport.isend = perhaps
program = runtime.load(folder, transport, threads=1)
program(given)
deadly += [rank] if rank == 1 else []
program(given)
"""


def killed_at(folder: Path, board: Path, given: str) -> dict[int, tuple[int, str]]:
    """The step and the action of ranks 1 and 2, as the status board has them, of a job of three whose rank 1 is killed.

    That is at its first send of the second step. `given`: lines of a script that define `given`, the inputs of a step. No rank waits.
    """
    create_board(board, 3)
    result = job(folder, given + _KILLED, environment={VARIABLE: str(board)})
    assert result.returncode not in (0, 1)
    assert "has waited" not in result.stderr
    found = read_board(board)
    return {rank: (step, describe_action(folder, rank, action)) for rank in (1, 2) for step, action in [found[rank]]}
