"""Shared memory of a host's ranks: values of many sizes are right on every rank; a variable switches it off; between hosts MPI goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mpi_ranks_case import MPIEXEC

SCRIPT = """
import os, random, sys
import numpy as np
from mpi4py import MPI
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.communication.mpi import MpiTransport
from partc.runtime.communication.transport import CollectiveArgs

rounds = int(sys.argv.pop(1))
transport = MpiTransport(MPI.COMM_WORLD)
rank, ranks = transport.rank, tuple(range(transport.size))
transport.create_groups([ranks])
shared = not transport.mpi_alone
alike, own = random.Random(1), random.Random(rank)
bound = []
for size in (1, 7, 513, 4095, 4096, 200_000):  # in place and not, of 8 bytes an element
    for kept in (False, True):
        source = np.zeros(size, np.int64)
        target = source if kept else np.zeros(size, np.int64)
        for reduce in ("sum", "max"):
            args = CollectiveArgs("AllReduce", ranks, 1, source.view(np.uint8), target.view(np.uint8), BY_NAME["int64"], reduce, 0, True)
            bound.append((source, target, reduce, transport.prepare(args)))
for turn in range(rounds):
    source, target, reduce, begin = bound[alike.randrange(len(bound) - 4 if turn % 50 else len(bound))]
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
    print("shared" if shared else transport.mpi_alone, flush=True)
"""


def run(script: str, ranks: int, *given: object) -> subprocess.CompletedProcess[str]:
    command = [str(MPIEXEC), "--oversubscribe", "-n", str(ranks), sys.executable, "-c", script, *map(str, given)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **root})


def test_many_rounds_of_many_sizes_are_right_and_one_rank_switches_it_off_for_all() -> None:
    switched_off = "os.environ['PARTC_SHARED_MEMORY'] = str(rank)\n"
    result = run(f"{SCRIPT}\n{switched_off}{SCRIPT}", 2, 4000, 100)
    assert result.stdout.splitlines() == ["shared", "rank 0: PARTC_SHARED_MEMORY=0"], result.stderr


EVERYTHING = """
import faulthandler, platform, sys
import numpy as np
from mpi4py import MPI
hosts = sys.argv.pop(1)
faulthandler.dump_traceback_later(100, exit=True)
platform.node = lambda: hosts[MPI.COMM_WORLD.rank]  # ranks of one letter are on one host
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.communication.mpi import MpiTransport
from partc.runtime.communication.transport import CollectiveArgs

transport = MpiTransport(MPI.COMM_WORLD)
me, size = transport.rank, transport.size
lists = [tuple(range(size)), (0, 1), tuple(range(2, size)), tuple(range(1, size))]
transport.create_groups([one for one in lists if len(one) > 1])

def raw(array):
    return array.reshape(-1).view(np.uint8)

def run(ranks, op, source, target, reduce="", root=0):
    request = transport.prepare(CollectiveArgs(op, ranks, 1, raw(source), raw(target), BY_NAME["float"], reduce, root))()
    transport.wait(request, lambda: op)

nothing, chance = np.empty(0, np.float32), np.random.default_rng(7)
channel = transport.agreements()
for n in (1, 1000, 150_001):
    for ranks in lists:
        every = {rank: chance.normal(size=len(ranks) * n).astype(np.float32) for rank in ranks}
        if me not in ranks or len(ranks) < 2:
            continue
        mine, place, last = every[me], ranks.index(me), ranks[-1]
        total = sum(every.values())
        target = np.empty_like(mine)
        run(ranks, "AllReduce", mine, target, "sum")
        assert np.allclose(target, total, 1e-5, 1e-5)
        target = mine.copy()
        run(ranks, "AllReduce", target, target, "sum")
        assert np.allclose(target, total, 1e-5, 1e-5)
        target = np.empty(n, np.float32)
        run(ranks, "ReduceScatter", mine, target, "sum")
        assert np.allclose(target, total[place * n :][:n], 1e-5, 1e-5)
        target = np.empty_like(mine)
        run(ranks, "AllToAll", mine, target)
        assert (target == np.concatenate([one[place * n :][:n] for one in every.values()])).all()
        run(ranks, "AllGather", mine[:n], target)
        assert (target == np.concatenate([one[:n] for one in every.values()])).all()
        target = np.empty(n if me == last else 0, np.float32)
        run(ranks, "Reduce", mine[:n], target, "sum", len(ranks) - 1)
        assert np.allclose(target, sum(one[:n] for one in every.values()) if me == last else nothing, 1e-5, 1e-5)
        target = mine.copy()
        run(ranks, "Broadcast", nothing, target, "", len(ranks) - 1)
        assert (target == every[last]).all()
        targets = [np.empty_like(mine) for _ in range(5)]  # begun together, waited for in another order on each rank
        args = [CollectiveArgs("AllReduce", ranks, 1, raw(mine), raw(one), BY_NAME["float"], "sum") for one in targets]
        begun = [transport.prepare(one)() for one in args]
        for request in begun[:: -1 if me % 2 else 1]:
            transport.wait(request, lambda: "one of several")
        assert all(np.allclose(one, total, 1e-5, 1e-5) for one in targets)
        peers = [rank for rank in ranks if rank != me]
        got = {(peer, tag): np.empty_like(mine) for tag in (6, 5) for peer in peers}
        late = n % 2 == place % 2
        coming = [] if late else [transport.irecv(raw(into), *key) for key, into in got.items()]
        leaving = [transport.isend(raw(mine + tag), peer, tag) for tag in (5, 6) for peer in peers]
        coming = coming or [transport.irecv(raw(into), *key) for key, into in got.items()]
        for request in coming + leaving:
            transport.wait(request, lambda: "a message")
        assert all((into == every[peer] + np.float32(tag)).all() for (peer, tag), into in got.items())
    ahead = channel.begin(np.full(4, me))
    assert transport.all_reduce_max(np.array([me, -me])).tolist() == [size - 1, 0]
    assert ahead().tolist() == [size - 1] * 4
    assert transport.all_gather_text("x" * me) == ["x" * rank for rank in range(size)]
transport.close()
if me == 0:
    print(bool(transport._plane), transport.mpi_alone, flush=True)
"""


def test_values_are_right_on_ranks_of_two_hosts() -> None:
    result = run(EVERYTHING, 4, "aabb")
    assert result.stdout == "True \n", result.stderr


LATE = """
import sys, time
from mpi4py import MPI
import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.communication.mpi import MpiTransport
from partc.runtime.communication.transport import CollectiveArgs

transport, given, made = MpiTransport(MPI.COMM_WORLD), np.ones(8, np.uint8), np.empty(8, np.uint8)
ranks = tuple(range(transport.size))
transport.create_groups([ranks])
agreements = transport.agreements()
waits = {
    "collective": lambda: transport.prepare(CollectiveArgs("AllReduce", ranks, 1, given, made, BY_NAME["uint8"], "sum"))(),
    "message": lambda: transport.isend(given, 0, 3) if transport.rank == 1 else transport.irecv(made, 1, 3),
    "agreement": lambda: agreements.begin(np.zeros(3, np.int64)),
}
for name, begin in waits.items():
    transport.all_gather_text("")
    if transport.rank == 1:
        time.sleep(0.6)
    before, request = time.process_time(), None
    if transport.rank < 2 or name != "message":
        request = begin()
        request() if callable(request) else transport.wait(request, lambda: name)
    taken = time.process_time() - before
    if transport.rank == 0:
        print(name, taken < 0.3, flush=True)  # one that spins takes 0.6
"""


BREAKS = """
def fails(*_):
    raise OSError("forbidden")

import os, partc.runtime.communication.host.segment as segment
memfd_create = os.memfd_create
"""


@pytest.fixture(scope="module")
def one_job() -> subprocess.CompletedProcess[str]:
    """Three ranks of one host, and of three; then where memory cannot be created, nor opened; then waits."""
    without = f"os.memfd_create = fails\n{EVERYTHING}\nos.memfd_create = memfd_create\n"
    without += (
        f"adopt, segment.Segment.adopt = segment.Segment.adopt, fails\n{EVERYTHING}\nsegment.Segment.adopt = adopt\n"
    )
    return run(f"{EVERYTHING}\n{EVERYTHING}\n{BREAKS}{without}{LATE}", 3, "aaa", "abc", "aaa", "aaa")


def test_values_are_right_on_ranks_of_one_host_and_of_three(one_job: subprocess.CompletedProcess[str]) -> None:
    assert one_job.stdout.splitlines()[:2] == ["True ", "False "], one_job.stderr


def test_where_memory_cannot_be_shared_all_ranks_use_mpi(one_job: subprocess.CompletedProcess[str]) -> None:
    assert one_job.stdout.splitlines()[2:4] == ["False rank 0: forbidden", "False rank 1: forbidden"], one_job.stderr


def test_a_rank_that_waits_keeps_no_core(one_job: subprocess.CompletedProcess[str]) -> None:
    assert one_job.stdout.splitlines()[4:] == ["collective True", "message True", "agreement True"], one_job.stderr


INTERRUPTED = """
import faulthandler, os, sys
import numpy as np
from mpi4py import MPI
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.communication.host import collectives, rounds
from partc.runtime.communication.host.messages import HostMessages
from partc.runtime.communication.mpi import MpiTransport
from partc.runtime.communication.transport import CollectiveArgs
from partc.runtime.errors import RankError
from partc.runtime.job import parking

faulthandler.dump_traceback_later(280, exit=True)
files = {rounds.__file__, collectives.__file__, parking.__file__}
seen = set()
me, all_ranks = MPI.COMM_WORLD.rank, tuple(range(MPI.COMM_WORLD.size))
day = 0 if os.environ.get("PARTC_TEST_ALL") else int(os.environ["PARTC_TEST_DAY"])

def trace(frame, event, given):
    code = frame.f_code
    if code.co_filename not in files and code not in (HostMessages._fill.__code__, HostMessages._release.__code__):
        return None
    line = code.co_filename, frame.f_lineno
    if event == "line" and line not in seen:
        seen.add(line)
        if day and (frame.f_lineno + day) % 4:  # the others are due on other days
            return trace
        raise KeyboardInterrupt
    return trace

def reduced(transport, ranks, size):
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    args = CollectiveArgs("AllReduce", ranks, 1, source, target, BY_NAME["uint8"], "sum")
    return transport.prepare(args)

def work(transport, of_pair, of_all):
    data = np.ones(1_500_000, np.uint8)
    for turn in range(2 if me < 2 else 0):
        transport.wait((transport.irecv if me == turn else transport.isend)(data, 1 - me, turn), lambda: "a message")
    for begin in of_pair + of_all:
        transport.wait(begin(), lambda: "a collective")

more = True
while more:
    transport, interrupted = MpiTransport(MPI.COMM_WORLD), False
    transport.create_groups([(0, 1), all_ranks])
    of_pair = [reduced(transport, (0, 1), size) for size in (8, 8, 1_000_000)] if me < 2 else []
    of_all = [reduced(transport, all_ranks, size) for size in (8, 100_000, 1_000_000)]
    try:
        if me == 1:
            sys.settrace(trace)
        work(transport, of_pair, of_all)
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted = True
        transport.fail("rank 1 was interrupted")
    except RankError as error:
        assert str(error) == "rank 1 was interrupted"
    sys.settrace(None)
    more = MPI.COMM_WORLD.bcast(interrupted, 1)
    if not more:
        transport.close()
if me == 1:
    print(len(seen) > 80, flush=True)
"""


def test_an_interrupt_at_any_line_ends_the_waits_of_the_other_ranks() -> None:
    """As by Ctrl-C between a store and the wake for it: the failing rank tells the others, which look after each short sleep."""
    result = run(INTERRUPTED, 3)
    assert result.stdout == "True\n", result.stdout + result.stderr
    assert "has waited" not in result.stderr  # no rank counts as stalled
