"""Messages under way go on while a rank computes, and nothing is asked of MPI where none is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import onnx.parser
import pytest
from partc.runtime.execution.step_plan import during_messages
from partc.runtime.job.progress import LONG, Progress
from partc.runtime.program.steps import Segment
from run_steps import steps_of
from waiting import until

MPIEXEC = Path(sys.executable).parent / "mpiexec"
TEXT = """<ir_version: 11, opset_import: ["" : 21, "partc.comm" : 1]>
rank (float[n] x) => (float[n] y, float[n] z) <float[n] a, float[n] b, float[n] c, float[n] r> {
    a = Neg(x)
    = partc.comm.Send <peer = 1, tag = 1> (a)
    b = Abs(x)
    = partc.comm.Send <peer = 1, tag = 2> (b)
    r = partc.comm.Recv <peer = 1, tag = 3> ()
    c = Exp(b)
    y = Add(r, c)
    z = partc.comm.AllReduce <group = "all", tag = 4, reduce = "sum"> (c)
}"""


def test_segments_beside_messages_are_known_before_they_run() -> None:
    steps = steps_of(onnx.parser.parse_model(TEXT), "rank", {"all": (0, 1)})
    made = {index: list(step.outputs) for index, step in enumerate(steps) if isinstance(step, Segment)}
    beside = [made[index] for index in sorted(during_messages(steps, {4}))]
    assert beside == [made[index] for index in sorted(made)][1:]


def test_a_long_call_is_accompanied_and_a_short_one_is_not() -> None:
    seen: list[bool] = []
    inside = False
    progress = Progress(lambda: seen.append(inside), threads=True)

    def compute() -> None:
        nonlocal inside
        inside = True
        until(lambda: seen.count(True) >= 3)
        inside = False

    progress.during(compute)()
    assert seen.count(True) == progress.tests
    assert seen[-1] is False
    before, run = progress.tests, progress.during(lambda: None)
    for _ in range(1000):
        run()
    assert progress.tests < before + 50
    progress.close()


def test_no_test_is_under_way_when_a_call_has_ended() -> None:
    testing, begun = False, threading.Event()

    def slow() -> None:
        nonlocal testing
        testing = True
        begun.set()
        time.sleep(3 * LONG)
        testing = False

    progress = Progress(slow, threads=True)

    def compute() -> None:
        begun.clear()
        assert begun.wait(60)

    progress._tested = float("inf")
    run = progress.during(compute)
    for _ in range(5):
        run()
        assert not testing
    progress.close()


def test_with_one_thread_there_are_tests_between_calls_alone() -> None:
    seen: list[int] = []
    progress = Progress(lambda: seen.append(1), threads=False)
    run = progress.during(lambda: time.sleep(LONG))
    for _ in range(3):
        run()
    assert len(seen) == 3
    assert progress.tests == 0


def test_a_failure_ends_the_accompaniment() -> None:
    progress = Progress(lambda: None, threads=True)

    def fails() -> None:
        time.sleep(2 * LONG)
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        progress.during(fails)()
    tests = progress.tests
    time.sleep(5 * LONG)
    assert progress.tests == tests
    progress.close()


SCRIPT = """
import os, sys, time
import numpy as np
from mpi4py import MPI
from partc.runtime.communication.mpi import MpiTransport
transport = MpiTransport(MPI.COMM_WORLD)
data = np.full(1 << 21, transport.rank, np.uint8)
arrived = sys.argv[1]

def compute():  # until the other rank has the message
    while not os.path.exists(arrived):
        time.sleep(0.001)
    print("arrived")

if transport.rank == 0:
    request = transport.isend(data, 1, 5)
    transport.with_progress(compute)()
else:
    request = transport.irecv(data, 0, 5)
transport.wait(request, lambda: "it")
assert not data.any()
if transport.rank == 1:
    open(arrived, "w").close()
transport.close()
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")
def test_a_large_message_arrives_over_tcp_while_its_sender_computes(tmp_path: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,tcp"}
    command = [str(MPIEXEC), "--oversubscribe", "-n", "2", sys.executable, "-c", SCRIPT, str(tmp_path / "arrived")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **root})
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["arrived"]
