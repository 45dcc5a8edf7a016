"""Collectives over real MPI: the values of every op on 4 ranks, equal bits on all of them, failures and stalls by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from collectives_mpi_case import MPIEXEC, every_op
from mpi_ranks_case import REPORTS

if not MPIEXEC.exists():
    pytest.skip("no mpiexec beside this Python", allow_module_level=True)


SCRIPT = (
    f"""
import faulthandler, os, sys, time, weakref
{REPORTS}"""
    + """
import numpy as np
from mpi4py import MPI
import partc.runtime as runtime
from partc.runtime.communication.mpi import MpiTransport
folder, comm = sys.argv[1], MPI.COMM_WORLD
rank = comm.rank
faulthandler.dump_traceback_later(110, exit=True)

def inputs(rank, step):
    x = np.random.default_rng([rank, step]).normal(size=(5, 6)).astype(np.float32)
    x[0, 0], x[1, 1], x[2, 2] = 0, [0.0, -0.0, 0.0, -0.0][rank], np.nan if rank == 2 else 1
    return {"x": x, "index": np.arange(5), "half": x[:3, :4].astype(np.float16)}

def pair(rank, lists):
    return next(one for one in lists if rank in one)

def check(found, step):
    every = [inputs(one, step) for one in range(4)]
    x = [one["x"] for one in every]
    pairs, crossed = pair(rank, [[0, 1], [3, 2]]), pair(rank, [[0, 2], [1, 3]])
    np.testing.assert_allclose(found["sums"], sum(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["highest"], np.maximum(x[crossed[0]], x[crossed[1]]))
    wide = {one: np.concatenate([x[other] for other in pair(one, [[0, 1], [3, 2]])], 1) for one in range(4)}
    np.testing.assert_allclose(found["rows"], np.split(sum(wide.values()), 4, 1)[rank], rtol=1e-5, atol=1e-6)
    mine = pairs.index(rank)
    np.testing.assert_array_equal(found["columns"], np.concatenate([np.split(x[one], 2, 1)[mine] for one in pairs], 1))
    np.testing.assert_array_equal(found["loose"], np.concatenate([np.nonzero(x[one]) for one in pairs], 1))
    ring = np.concatenate([x[(rank + 3) % 4][:, :3], x[rank][:, 3:]], 1)
    np.testing.assert_array_equal(found["ring"], ring)
    halves = sum(one["half"].astype(np.float32) for one in every).astype(np.float16)
    np.testing.assert_array_equal(found["halves"], halves)
    np.testing.assert_allclose(found["crown"], -sum(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["widest"], -np.maximum.reduce([one["half"] for one in every]))
    table = np.concatenate([every[one]["half"] for one in (3, 0, 1, 2)])
    np.testing.assert_array_equal(found["looked_up"], table[:5])
    own = {3: [0, 1, 2], 0: [0, 1]}.get(rank, [])
    np.testing.assert_array_equal(found["numbers"], own * 4)
    np.testing.assert_array_equal(found["sent_back"], np.tile(table[:5][[one + 3 * (rank == 0) for one in own]], (4, 1)))
    for name, among in (("sums", [0, 1, 2, 3]), ("highest", crossed), ("halves", [0, 1, 2, 3])):
        bits = comm.allgather(found[name].tobytes())
        assert all(bits[one] == bits[rank] for one in among), name

transport = MpiTransport(comm)
vector = np.full(9, rank)
kept, agreed = weakref.ref(vector), transport.agreements().begin(vector)
del vector
if kept() is not None and agreed().tolist() == [3] * 9:
    print("what is told stays", flush=True)
transport.close()

for spins in (False, True):
    transport = MpiTransport(comm)
    transport.has_own_core = spins
    with runtime.load(folder, transport, threads=1) as program:
        at_once = sorted(program._at_once)
        for step in range(3):
            check(program(inputs(rank, step)), step)
    if rank == 0:
        print("at once", at_once, flush=True)

transport = MpiTransport(comm, stall=0.2)
transport.has_own_core = True
with runtime.load(folder, transport, threads=1) as program:
    program(inputs(rank, 0))
    run = program._program.runners[0].session.run_with_iobinding
    if rank == 3:
        schedule = next(iter(program._schedules.values()))
        index, action = next(pair for pair in schedule.actions if pair[0] == 0)
        schedule.actions[schedule.actions.index((index, action))] = (index, lambda: (reported("rank 2 has waited"), action()))
    program(inputs(rank, 0))

for spins in (False, True):
    transport = MpiTransport(comm)
    transport.has_own_core = spins
    program = runtime.load(folder, transport, threads=1)
    try:
        program({**inputs(rank, 0), "index": np.array([0, 77 if rank == 1 else 1])})
        print("not raised", flush=True)
    except runtime.RankError as error:
        print("raised:", str(error)[:37], flush=True)
print("done", flush=True)
"""
)


@pytest.fixture(scope="module")
def one_job(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A job that does all of it, one after the other."""
    folder = every_op(tmp_path_factory.mktemp("artifact"))
    command = [str(MPIEXEC), "--oversubscribe", "-n", "4", sys.executable, "-c", SCRIPT, str(folder)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **root})
    assert result.stdout.splitlines().count("done") == 4, result.stderr
    return result


def test_values_and_equal_bits(one_job: subprocess.CompletedProcess[str]) -> None:
    """Waited for as soon as they begin, where each rank has a core: those whose output is the next thing needed."""
    lines = [line for line in one_job.stdout.splitlines() if line.startswith("at once")]
    assert lines == ["at once []", "at once [1, 7]"]


def test_what_a_rank_tells_stays_until_all_have_it(one_job: subprocess.CompletedProcess[str]) -> None:
    """Nobody but the agreement holds it, and other threads of the rank would be given its memory."""
    assert one_job.stdout.splitlines().count("what is told stays") == 4


def test_a_late_rank_is_reported_by_the_collective(one_job: subprocess.CompletedProcess[str]) -> None:
    what = "AllGather of 'wide' in group 'pairs', ranks 3, 2 (net.wide)"
    assert re.search(rf"^partc: rank 2 has waited \d+ s: {re.escape(what)}", one_job.stderr, re.MULTILINE)


def test_a_failure_is_raised_on_every_rank(one_job: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in one_job.stdout.splitlines() if "raised" in line]
    assert lines == ["raised: rank 1 failed in Gather (net.h): Erro"] * 8
    assert not re.search(r"has waited ([3-9]\d|\d{3,}) s", one_job.stderr)  # as one that counts as stalled
