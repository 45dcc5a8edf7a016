"""The launcher: what is found, what is started, and what is said once when a rank fails or is killed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from artifact_edit import chain, chain_reference
from partc.cli.job.__main__ import main as rank_main
from partc.cli.job.job import BOARD
from partc.cli.launch import launcher
from partc.cli.launch.launcher import Hosts, Kind, Launcher, command_line, find_launcher
from partc.cli.launch.run_dir import RunDir
from partc.cli.launch.signals import Signals
from partc.cli.launch.supervise import LauncherOutput, Outcome, RankEnd, supervise
from partc.cli.main import invoke
from partc.runtime.errors import UsageError
from partc.runtime.job.place import Place, surrounding_job
from partc.runtime.job.status_board import VARIABLE, note_joined, write_pid
from waiting import LONG, until

SAMPLES = Path(__file__).parents[2] / "samples"

OPEN_MPI_KILLED = """\
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 4400 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_EXITED = """\
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-4562@1,2]
   Exit code:    3
--------------------------------------------------------------------------
"""
OPEN_MPI_LEFT = """\
--------------------------------------------------------------------------
prterun has exited due to process rank 1 with PID 17855 on node vm exiting
improperly. There are three reasons this could occur:
--------------------------------------------------------------------------
"""
MPICH_KILLED = """\

===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 6499 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
OPEN_MPI_PEER_GONE = """\
--------------------------------------------------------------------------
An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process (e.g., a crash or
otherwise exiting without calling MPI_FINALIZE first).

  Local host: first
  Local PID:  9
  Peer host:  second
--------------------------------------------------------------------------
[first:00000] *** An error occurred in Socket closed
[first:00000] *** on a NULL communicator
"""
SLURM_KILLED = "srun: error: node3: task 4: Killed\nsrun: Terminating StepId=12.0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI_KILLED, RankEnd(rank=1, pid=4400, signal=9)),
        (OPEN_MPI_LEFT, RankEnd(rank=1, pid=17855, code=0)),
        (OPEN_MPI_EXITED, RankEnd(rank=2, code=3)),
        (MPICH_KILLED, RankEnd(pid=6499, signal=9)),
        (SLURM_KILLED, RankEnd(rank=4, signal=9)),
        (OPEN_MPI_PEER_GONE, RankEnd(host="second")),
        ("[first:00000] *** An error occurred in Socket closed\n", RankEnd(host="")),
        ("[first][[27256,1],0][/opal/mca/btl/tcp/btl_tcp_frag.c:127:send] writev failed: Broken pipe (32)\n", None),
        (OPEN_MPI_PEER_GONE + OPEN_MPI_KILLED, RankEnd(rank=1, pid=4400, signal=9)),
    ],
)
def test_a_launchers_words_are_held_back_and_read(text: str, expected: RankEnd | None) -> None:
    output = LauncherOutput()
    passed = [line for line in text.splitlines() if not output.hold(line) and line]
    assert passed == []
    assert output.ended() == expected


@pytest.mark.parametrize("line", ["partc: rank 0 has waited 2 s: Recv of 'y'", "[rank 3] hello", "-- a list", ""])
def test_a_ranks_words_pass(line: str) -> None:
    assert not LauncherOutput().hold(line)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, Place(3, 5)),
        ({"PMI_RANK": "2", "PMI_SIZE": "7"}, Place(2, 7)),
        ({"PMIX_RANK": "1"}, Place(1, None)),
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "6", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "4"}, Place(4, 6)),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    ],
)
def test_a_surrounding_launcher_is_known_by_its_variables(environment: Mapping[str, str], place: Place | None) -> None:
    assert surrounding_job(environment) == place


@pytest.mark.parametrize(
    ("kind", "hosts", "expected"),
    [
        (Kind.OPEN_MPI, Hosts(names="a,b"), "run -n 300 --bind-to none --host a,b -x A prog"),
        (Kind.OPEN_MPI, Hosts(file="h"), "run -n 300 --bind-to none --hostfile h -x A prog"),
        (Kind.OPEN_MPI, Hosts(), "run -n 300 --bind-to none --oversubscribe -x A prog"),
        (Kind.HYDRA, Hosts(file="h"), "run -n 300 -f h -x A prog"),
        (Kind.HYDRA, Hosts(names="a,b"), "run -n 300 -hosts a,b -x A prog"),
        (Kind.SLURM, Hosts(names="a,b"), "run -n 300 --kill-on-bad-exit=1 --cpu-bind=none --nodelist a,b -x A prog"),
    ],
)
def test_each_launcher_gets_its_own_options(kind: Kind, hosts: Hosts, expected: str) -> None:
    assert command_line(Launcher("run", kind), 300, hosts, ["-x", "A"], ["prog"]) == expected.split()


def test_the_users_binding_is_kept() -> None:
    command = command_line(Launcher("run", Kind.OPEN_MPI), 2, Hosts("h"), ["--bind-to", "core"], ["prog"])
    assert command.count("--bind-to") == 1


def test_no_mpi_is_one_error_with_two_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"the 5 ranks\n  help: .*partc\[mpi\].*--in-process"):
        find_launcher(5)


@pytest.mark.parametrize(
    "words",
    [("measure", "-o", "machine.yaml", "-n", "2"), ("verify", "model.py", "--plan", "plan.yaml", "--mpi")],
    ids=["measure", "verify"],
)
def test_a_command_without_in_process_does_not_advise_it(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(SAMPLES / "two_stage" / "model.py", tmp_path)
    shutil.copy(SAMPLES / "two_stage" / "train.yaml", tmp_path / "plan.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher.shutil, "which", lambda *names, **path: None)
    assert invoke([*words]) == 2
    told = capsys.readouterr().err
    assert "partc[mpi]" in told
    assert "--in-process" not in told


@pytest.mark.parametrize("name", ["mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich"])
def test_mpich_is_found_where_it_is_the_only_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / name
    launcher.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_launcher(2) == Launcher(str(launcher), Kind.HYDRA)


needs_mpi = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpiexec").exists(), reason="the environment has no mpiexec of its own"
)


def partc(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "partc.cli", *map(str, arguments)]
    environment = {**os.environ, "TMPDIR": str(cwd)}
    # A shell starts what it puts in the background with SIGINT ignored, and that is inherited; here it is to be heard.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, heard)


Answer = tuple[int, str, str]
"""Exit code, stdout and stderr."""


@pytest.fixture
def called(build: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """A command in this process, whose ranks have theirs."""

    def run(*arguments: object) -> Answer:
        monkeypatch.chdir(build.parent)
        monkeypatch.setenv("TMPDIR", str(build.parent))
        monkeypatch.setattr(tempfile, "tempdir", None)
        capfd.readouterr()
        code = invoke([*map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, and what is on stdout and stderr; what stays alive is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=LONG)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Path]:
    """The chain's artifact; afterwards nothing else may be left in the folder that was the run's temporary one."""
    yield chain(tmp_path / "build")
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(("partc-", ".never", "never"))]
    assert left == []


def save_inputs(folder: Path, index: list[int]) -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(6, 5)).astype(np.float32)
    inputs = {"x": x, "index": np.array(index)}
    np.savez(folder / "in.npz", x=x, index=inputs["index"])
    return inputs


def without_progress(err: str) -> str:
    """What is told beside how far a run is, which is told where its steps are slow, as on a machine with much to do."""
    return re.sub(r"^step \d+ of \d+\n", "", err, flags=re.MULTILINE)


@needs_mpi
def test_outputs_of_all_ranks_come_into_one_file(build: Path) -> None:
    inputs = save_inputs(build.parent, [0, 5])
    code, out, err = finish(partc("run", "--input", "in.npz", "-o", "out.npz", "--repeat", 3, cwd=build.parent))
    assert (code, without_progress(err)) == (0, "")
    assert "then 2 steps: median" in out
    expected = chain_reference(inputs["x"], inputs["index"])
    with np.load(build.parent / "out.npz") as found:
        assert sorted(found) == ["mid", "y"]
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


@needs_mpi
def test_a_failing_op_is_told_once_and_leaves_nothing(build: Path, called: Callable[..., Answer]) -> None:
    save_inputs(build.parent, [0, 9])
    code, out, err = called("run", "--input", "in.npz", "-o", "never.npz")
    assert code == 1
    assert out == ""
    assert "has waited" not in err  # no rank counts as stalled before
    assert err.count("rank 2") == 1
    assert "(pick)" in err
    assert "MPI_ABORT" not in err
    assert "Traceback" not in err


@needs_mpi
def test_a_truncated_file_of_one_rank_is_told_once(build: Path, called: Callable[..., Answer]) -> None:
    file = build / "weights" / "rank_0001.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    code, _, err = called("run", "--random", 1)
    assert code == 1
    assert err.count("rank_0001.safetensors: has 161 bytes, the manifest says 164") == 1
    assert len(err.splitlines()) == 2


@needs_mpi
def test_what_the_launcher_was_given_of_mpi_is_named(
    called: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "nothing")
    code, _, err = called("run", "--random", 1)
    assert code == 1
    assert "help: the environment has OMPI_MCA_btl: `unset` what is left of another job" in err


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path) -> list[int]:
    """The ranks' process ids, once each has taken a step."""
    from partc.runtime.job.status_board import read_board, read_pids

    def stepping() -> list[int]:
        assert process.poll() is None, process.communicate()
        for folder in run_dir.glob("partc-run-*"):
            if not ((folder / "pids").exists() and (folder / "board").exists()):
                continue
            pids, board = read_pids(folder), read_board(folder / "board")
            if all(pids) and all(step > 2 for step, _ in board):
                return pids
        return []

    until(stepping)
    return stepping()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def kill_rank(process: subprocess.Popen[str], pids: list[int]) -> None:
    os.kill(pids[1], signal.SIGKILL)


def end_parent(process: subprocess.Popen[str], pids: list[int]) -> None:
    process.send_signal(signal.SIGTERM)


def interrupt_parent(process: subprocess.Popen[str], pids: list[int]) -> None:
    process.send_signal(signal.SIGINT)


@needs_mpi
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("act", "code", "expected"),
    [
        (kill_rank, 1, "rank 1 was killed by signal 9 (SIGKILL)"),
        (end_parent, 143, ""),
        (interrupt_parent, 130, ""),
    ],
)
def test_the_end_of_one_process_is_the_end_of_all(
    build: Path, act: Callable[[subprocess.Popen[str], list[int]], None], code: int, expected: str
) -> None:
    save_inputs(build.parent, [0, 5])
    process = partc("run", "--input", "in.npz", "-o", "never.npz", "--repeat", 10**9, cwd=build.parent)
    pids = wait_for_steps(process, build.parent)
    act(process, pids)
    found, out, err = finish(process)
    assert found == code
    assert "has waited" not in err
    assert out == ""
    assert without_progress(err).startswith(expected)
    assert err.count("rank") == expected.count("rank") or " step " in err
    assert "Traceback" not in err
    assert not any(running(pid) for pid in pids)


STOPS = """\
import os, signal, sys
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@needs_mpi
def test_a_rank_that_stops_before_it_has_noted_its_process_is_named(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_inputs(build.parent, [0, 5])
    (build.parent / "sitecustomize.py").write_text(STOPS)  # runs as Python begins, before anything of partc
    monkeypatch.setenv("PYTHONPATH", str(build.parent))
    process = partc("run", "--input", "in.npz", "-o", "never.npz", "--stall", 0.5, cwd=build.parent)
    assert process.stderr is not None
    said = ""
    while "rank 1 has not begun: stopped" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] != 0


def test_a_start_of_mpi_that_never_ends_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ranks have a process, and one of them never joins the other."""
    monkeypatch.setattr("partc.cli.launch.supervise._BEGINS", 0.5)
    with RunDir(2) as run_dir:
        for rank in range(2):
            write_pid(run_dir.folder, rank)
        monkeypatch.setenv(VARIABLE, str(run_dir.folder / BOARD))
        note_joined(0)
        command = ["tail", "-f", str(run_dir.folder / BOARD)]
        outcome = supervise(
            command, os.environ, run_dir, lambda rank, action: "", lambda: None, lambda: None, Signals(), local=True
        )
    assert outcome == Outcome(1, is_lost=True)
    assert "MPI has not begun: rank 1 has waited 2 s for it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "queues", "outcome", "said"),
    [
        (
            "exec sleep 60",
            False,
            Outcome(1, is_lost=True),
            "MPI has not begun: the launcher has started no rank in 2 s",
        ),
        ("echo partc-begun >&2; sleep 4; echo partc-ended >&2", False, Outcome(0), ""),
        ("sleep 4; echo partc-ended >&2", True, Outcome(0), ""),
        ("echo partc-begun >&2", False, Outcome(1, is_lost=True), "ended with exit code 0 before rank 0 was done"),
    ],
)
def test_a_launcher_that_starts_no_rank_anywhere_is_lost(
    command: str,
    queues: bool,
    outcome: Outcome,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All ranks may be on other hosts: rank 0 then reports that MPI has begun; srun may wait for slots."""
    monkeypatch.setattr("partc.cli.launch.supervise._BEGINS_SOMEWHERE", 0.5)
    launcher = tmp_path / ("srun" if queues else "mpiexec")
    launcher.write_text(f"#!/bin/sh\n{command}\n")
    launcher.chmod(0o755)
    with RunDir(2) as run_dir:
        ended = supervise(
            [str(launcher)], os.environ, run_dir, lambda rank, action: "", lambda: None, lambda: None, Signals()
        )
    assert ended == outcome
    err = capfd.readouterr().err
    assert said in err if said else err == ""


ROOT = "prterun has detected an attempt to run as root.\\n\\nYou can override this by adding the --allow-run-as-root\\n"
ABSENT = (
    "prterun was unable to launch the specified application as it could not\\naccess an executable:\\n\\n   Node: b\\n"
)


ELSEWHERE = "python: Error while finding module specification for 'partc.cli.job' (ModuleNotFoundError: No module named 'partc')\n"
NOT_BACK = "A daemon failed to report back after being spawned. This could\\nbe due to several factors\\n  Daemon exit status: "


@pytest.mark.parametrize(
    ("words", "code", "is_lost", "help"),
    [
        (ELSEWHERE, 1, False, "each host needs Python and partc at the path of this one"),
        (ROOT, 1, False, "Open MPI refuses to run as root: use partc run -- --allow-run-as-root"),
        (ABSENT, 183, False, "each host needs Python and partc at the path of this one"),
        (f"{NOT_BACK}127\\n", 127, False, "each host needs Python and partc at the path of this one"),
        (f"{NOT_BACK}255\\n", 255, True, "the host was lost or cannot be reached"),
    ],
)
def test_a_launcher_that_starts_no_rank_is_told_with_the_remedy(
    words: str, code: int, is_lost: bool, help: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunDir(2) as run_dir:
        command = ["sh", "-c", f"printf '%b' {shlex.quote(words)} >&2; exit {code}"]
        outcome = supervise(
            command, os.environ, run_dir, lambda rank, action: "", lambda: None, lambda: None, Signals()
        )
    assert outcome == Outcome(1, is_lost)
    assert f"help: {help}" in capfd.readouterr().err


def test_a_launcher_that_hears_a_request_to_save_and_ends_ends_the_job_by_it(capfd: pytest.CaptureFixture[str]) -> None:
    """`scancel` signals all processes of a batch script, the launcher too."""
    with RunDir(2) as run_dir, Signals(("SIGTERM",)) as signals:
        command = ["sh", "-c", "kill -TERM $PPID; exit 1"]
        outcome = supervise(command, os.environ, run_dir, lambda rank, action: "", lambda: None, lambda: None, signals)
    assert (outcome, signals.noted) == (Outcome(128 + signal.SIGTERM), [signal.SIGTERM])
    assert capfd.readouterr().err == ""


WAITS = """
import time
from partc.cli import interruption
from partc.cli.launch.signals import Signals
interruption._PATIENCE = 0.2
interruption.listen(["run"])
with Signals():
    print(flush=True)
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_launch_that_waits_for_something_else_ends_by_a_signal(name: str) -> None:
    """A handler that notes a signal raises nothing: where nothing looks at its notes, a thread ends the process."""
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(getattr(signal, name))
        try:
            _, said = process.communicate(timeout=LONG)
        finally:
            process.kill()
    assert (process.returncode, said) == (128 + getattr(signal, name), f"stopped by {name}\n")


def test_a_rank_that_cannot_load_for_want_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where memory is short, Python fails to load a module with whatever error it meets."""

    def fails(*given: object) -> int:
        raise ValueError("field 'target' is required for AnnAssign")

    monkeypatch.setattr("partc.cli.job.rank.run_rank", fails)
    monkeypatch.setattr("partc.cli.job.job.Job.loads", lambda text: None)
    monkeypatch.setattr("partc.cli.output.failures._is_near_limit", lambda: True)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("sys.argv", ["partc.cli.job", "{}"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        rank_main()
    signal.signal(signal.SIGINT, before)
    assert caught.value.code == 1
    assert capfd.readouterr().err.startswith("no memory is left: ValueError: field 'target' is required for AnnAssign")


def test_a_rank_that_says_that_no_memory_is_left_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with RunDir(2) as run_dir:
        ended = "Process name: [prterun-a-1@1,1]\\n Exit code: 1"
        words = "\\n".join(["no memory is left: ValueError: of a library", "-" * 74, ended, "-" * 74, ""])
        command = ["sh", "-c", f"printf '%b' {shlex.quote(words)} >&2; exit 1"]
        outcome = supervise(
            command, os.environ, run_dir, lambda rank, action: "", lambda: None, lambda: None, Signals()
        )
    assert outcome == Outcome(1, is_lost=True), capfd.readouterr().err
