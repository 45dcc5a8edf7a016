"""A rank that leaves, dies or stops while others wait for it: they are told what happened and where, and the job ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from handmade import chain
from partc.cli.signals import Signals
from partc.runtime.leaving import described
from test_runtime_mpi import MPIEXEC, job

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
        ("raise ValueError('bad')", "rank 1 has left the job: ValueError: bad"),
    ],
)
def test_a_script_that_ends_early_is_told_to_the_ranks_that_wait(tmp_path: Path, what: str, expected: str) -> None:
    begun = time.monotonic()
    result = job(chain(tmp_path / "build"), LEFT.replace("WHAT", what))
    assert result.returncode != 0
    assert result.stdout.splitlines() == [f"told: {expected}"] * 2
    assert time.monotonic() - begun < 20


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


def test_an_error_is_described_with_its_place_in_the_users_files(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text("import sys\n\ndef leave():\n    sys.exit(3)\n")
    scope: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(SystemExit) as caught:
        scope["leave"]()  # type: ignore[operator]
    assert described(caught.value) == f"SystemExit(3) at {file}:4"


def test_signals_are_noted_and_ignored_ones_stay_ignored() -> None:
    import signal

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.exit_code is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert (signals.exit_code, signals.again) == (143, False)
            os.kill(os.getpid(), signal.SIGINT)
            assert (signals.exit_code, signals.again) == (143, True)
    finally:
        signal.signal(signal.SIGHUP, before)
