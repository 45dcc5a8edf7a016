"""A rank that leaves, dies or stops while others wait for it: they are told what happened and where, and the job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from artifact_edit import chain
from mpi_ranks_case import MPIEXEC, job
from partc.cli.launch.signals import Signals
from partc.cli.launch.supervise import Stopped
from partc.runtime import load_trainer
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.communication.transport import Transport
from partc.runtime.errors import ArtifactError, RankError
from partc.runtime.execution.rank_threads import RankThreads, is_rank_running
from small_training import DATA_PARALLEL, PERCEPTRON, compiled
from waiting import until

pytestmark = pytest.mark.skipif(not MPIEXEC.exists(), reason="the environment has no mpiexec of its own")

LEFT = """
program = runtime.load(folder, threads=1)
program({"x": np.zeros((6, 5), np.float32), "index": np.array([0, 5])})
if rank == 1:
    WHAT
try:
    program({"x": np.zeros((6, 5), np.float32), "index": np.array([0, 5])})
except runtime.RankError as error:
    print("told:", error, flush=True)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("sys.exit(3)", "rank 1 has left the job: its script has ended"),
        ("raise ValueError('bad')", "rank 1 has left the job: <string>:16: ValueError: bad"),
    ],
)
def test_a_script_that_ends_early_is_told_to_the_ranks_that_wait(tmp_path: Path, what: str, expected: str) -> None:
    result = job(chain(tmp_path / "build"), LEFT.replace("WHAT", what))
    assert result.returncode != 0
    assert result.stdout.splitlines() == [f"told: {expected}"] * 2
    assert "has waited" not in result.stderr  # no rank counts as stalled before


ENDED = """
program = runtime.load(folder, threads=1)
for _ in range(3):
    program({"x": np.zeros((6, 5), np.float32), "index": np.array([0, 5])})
    if rank == 2:
        time.sleep(0.2)
print("whole", flush=True)
"""


def test_ranks_that_end_after_their_last_step_harm_nobody(tmp_path: Path) -> None:
    result = job(chain(tmp_path / "build"), ENDED)
    assert (result.returncode, result.stdout.splitlines()) == (0, ["whole"] * 3), result.stderr


def test_signals_are_noted_and_ignored_ones_stay_ignored() -> None:
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts jobs in the background without
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.exit_code is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert (signals.exit_code, signals.again) == (143, False)
            os.kill(os.getpid(), signal.SIGINT)
            assert (signals.exit_code, signals.again) == (143, True)
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGINT, interrupt)


def test_what_one_rank_alone_cannot_open_is_told_to_all(tmp_path: Path) -> None:
    folder = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL)
    world = LocalWorld(2)
    jobs = [partial(load_trainer, place, world.transport(rank)) for rank, place in enumerate((folder, tmp_path / "no"))]
    with pytest.raises(ArtifactError, match=r"^\S+no: there is no such folder") as caught:
        RankThreads(world).run(jobs, patience=5.0)
    assert "no rank can go on" not in str(caught.value)


def in_threads(second: Callable[[Transport], object]) -> list[object]:
    world = LocalWorld(2)
    first, other = world.transport(0), world.transport(1)
    return RankThreads(world).run([lambda: first.all_gather_text(""), lambda: second(other)], patience=1.0)


def test_a_thread_that_wants_to_end_the_process_ends_the_other_ranks() -> None:
    with pytest.raises(
        RankError, match=r"^rank 1 has left the job: \S+test_leaving.py:\d+: it ends .* SystemExit\(3\)$"
    ):
        in_threads(lambda _: sys.exit(3))


def test_an_interrupt_ends_ranks_that_wait_and_leaves_one_that_hangs() -> None:
    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    hung = threading.Event()
    before = signal.signal(signal.SIGALRM, interrupted)
    main = threading.main_thread().ident
    assert main is not None
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(lambda _: (signal.pthread_kill(main, signal.SIGALRM), hung.wait(60)))
        assert is_rank_running()
    finally:
        signal.signal(signal.SIGALRM, before)
        hung.set()


def test_a_rank_that_has_not_begun_is_told_where_all_are_of_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    local, elsewhere = Stopped(0.0, local=True), Stopped(0.0)
    for stopped in (local, elsewhere):
        stopped.look(os.getpid(), lambda: [os.getpid(), 0, os.getpid(), 0])
    said = capfd.readouterr().err
    assert said == "partc: the job has waited 0 s: ranks 1, 3 have not begun: stopped, or still loading Python\n"


def test_two_looks_at_once_read_the_process_ids_once() -> None:
    reads, stopped = list[str](), Stopped(60.0)

    def ranks() -> list[int]:
        reads.append("read")
        return [os.getpid()]

    stopped.look(os.getpid(), ranks)
    stopped.look(os.getpid(), ranks)
    assert reads == ["read"]


def test_what_no_rank_can_tell_is_told_by_the_launching_process(capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as rank:
        try:
            rank.send_signal(signal.SIGSTOP)
            stopped, said = Stopped(0.3), ""

            def told() -> str:
                nonlocal said
                stopped.look(os.getpid(), lambda: [0, rank.pid])
                said += capfd.readouterr().err
                return said

            until(told)
        finally:
            rank.kill()
    assert said.startswith("partc: the job has waited ")
    assert said.endswith(f" s: rank 1 (process {rank.pid}) is stopped\n")
