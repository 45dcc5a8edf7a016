"""The runtime over real MPI: values, refusals, failures, a killed rank, stalls, and the status board, each as one small job."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from artifact_text import write
from mpi_ranks_case import GRAPHS, MPIEXEC, REPORTS, folder, job, killed_at
from partc.runtime import UsageError, load
from partc.runtime.communication.in_process import LocalWorld
from targeted import targeted

__all__ = ["folder"]

if not MPIEXEC.exists():
    pytest.skip("no mpiexec beside this Python", allow_module_level=True)


THREADS = """
import threading
program = runtime.load(folder)
refused, right = [], []

def meanwhile():
    while not program.turn.busy:
        time.sleep(0.001)
    for call in (lambda: program(good), lambda: program.any_rank(True), program.recover):
        try:
            call()
            refused.append("taken")
        except runtime.UsageError as error:
            refused.append(str(error).splitlines()[0])
    open(f"{folder}/refused{turn}.{rank}", "w").close()

for turn in range(5):
    other = threading.Thread(target=meanwhile) if rank != 2 else None
    if other:
        other.start()
    else:
        while not all(os.path.exists(f"{folder}/refused{turn}.{other}") for other in (0, 1)):
            time.sleep(0.001)  # the others are in the step until this one is
    made = program(good)
    if other:
        other.join()
    if rank == 0:
        right.append(bool((made["y"] == -np.abs(-x[[1, 6]])).all()))
program.close()
print("threads", rank, sorted(set(refused)), len(refused), right, flush=True)
"""
ONE_JOB = """
broken = sys.argv[1] + "/broken"
def say(*words):
    print(*words, flush=True)

comm = MPI.COMM_WORLD.Split(rank // 2)
if rank < 2:
    with runtime.load(sys.argv[1] + "/targeted", MpiTransport(comm), devices={"cuda": "cpu"}, trust=True, threads=1) as program:
        for k in range(30):
            found = program(x=x + k, at=np.array([2]))
        say("targets", rank, program.counts.copies, found["y"][0].tolist() if found else "")
        try:
            program(x=x, at=np.array([77]))
        except runtime.RankError as error:
            say("targets", rank, str(error).split(":")[0])

try:
    runtime.load(broken)
except runtime.ArtifactError as error:
    say("broken:", str(error).splitlines()[0].replace(broken + "/", ""))

transport = MpiTransport(MPI.COMM_WORLD, piece=16)
with runtime.load(folder, transport, threads=1) as program:
    for indices in ([1, 6], [0], [], [2, 2, 2], [1, 6]):
        outputs = program(x=x, index=np.array(indices, np.int64))
        assert (rank == 0) == bool(outputs), outputs
        if rank == 0:
            assert outputs["y"].tolist() == [[-value for value in x[i]] for i in indices], outputs
            assert [float(text) for text in outputs["t"]] == [x[i].sum() for i in indices], outputs
    for inputs in ({"x": x[:, :2], "index": np.array([1])}, {"x": x} if rank == 0 else {}):
        try:
            program(inputs)
            say("not refused")
        except runtime.InputError as error:
            say("refused:", str(error).splitlines()[0])
    assert program(good).keys() == ({"y", "t"} if rank == 0 else set())

transport = MpiTransport(MPI.COMM_WORLD, stall=0.2)
if rank == 1:
    isend = transport.isend
    def late(*rest):
        reported("rank 2 has waited", "rank 0 has waited")
        return isend(*rest)
    transport.isend = late
with runtime.load(folder, transport, threads=1) as program:
    program(good)
    if rank == 0:
        reported("rank 2 has waited [0-9]+ s: the agreement on the sizes of a step")
    program(good)

program = runtime.load(folder, threads=1)
for inputs in (bad, good):
    try:
        program(inputs)
        say("not raised")
    except runtime.RankError as error:
        say("raised:", str(error)[:44])
say("done")
"""


@pytest.fixture(scope="module")
def one_job(folder: Path) -> subprocess.CompletedProcess[str]:
    """A job that does, one after the other, all that leaves a job alive."""
    broken = write(folder / "broken", GRAPHS) / "rank_0002.onnx"
    broken.write_bytes(broken.read_bytes()[:-1])
    built = write(folder / "before", OF_TARGETS)
    targeted(built, folder / "targeted", lambda node: "cuda" if node.output[0] == "g" else "cpu")
    result = job(folder, REPORTS + THREADS + ONE_JOB)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines().count("done") == 3, result.stderr
    return result


def test_steps_run_in_shards_and_bad_inputs_are_refused_by_all(one_job: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in one_job.stdout.splitlines() if line.startswith(("refused", "not refused"))]
    axis, missing = (
        "refused: input 'x' axis 1 is 2, the model was compiled for 3",
        "refused: the input 'index' is missing",
    )
    assert sorted(lines) == [axis] * 3 + [missing] * 3


def test_a_failure_is_raised_on_every_rank(one_job: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in one_job.stdout.splitlines() if line.startswith(("raised", "not raised"))]
    first = "raised: rank 1 failed in Gather (net.f): Error in ex"
    again = "raised: the program has stopped: rank 1 failed in Ga"
    assert sorted(lines) == [first] * 3 + [again] * 3


def test_long_waits_are_reported(one_job: subprocess.CompletedProcess[str]) -> None:
    for rank, what in (
        (2, "Recv of 'f' from rank 1 (net.f)"),
        (0, "Recv of 'g' from rank 2 (net.g)"),
        (2, "the agreement on the sizes of a step"),
    ):
        assert re.search(rf"^partc: rank {rank} has waited \d+ s: {re.escape(what)}", one_job.stderr, re.MULTILINE)


def test_a_broken_file_is_an_error_on_every_rank(one_job: subprocess.CompletedProcess[str], folder: Path) -> None:
    size = (folder / "broken" / "rank_0002.onnx").stat().st_size
    message = f"broken: rank_0002.onnx: has {size} bytes, the manifest says {size + 1}"
    assert [line for line in one_job.stdout.splitlines() if line.startswith("broken")] == [message] * 3


def test_a_failure_aborts_the_job(folder: Path) -> None:
    result = job(folder, "runtime.load(folder, threads=1, on_error='abort')(bad)\n")
    assert result.returncode == 1
    assert "has waited" not in result.stderr  # no rank counts as stalled before
    assert result.stderr.count("rank 1 failed in Gather (net.f): ") == 1
    assert "Traceback" not in result.stderr


def test_a_killed_rank_ends_the_job_and_the_board_says_where_it_was(folder: Path, tmp_path: Path) -> None:
    assert killed_at(folder, tmp_path / "board", "given = good\n") == {
        1: (2, "Send of 'f' to rank 2 (net.f)"),
        2: (2, "Recv of 'f' from rank 1 (net.f)"),
    }


def test_a_wrong_number_of_ranks_says_the_right_one(folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(folder, LocalWorld(1).transport(0))
    assert str(caught.value) == (
        f"{folder}: was compiled for 3 ranks, this job has 1\n"
        f"  help: start it with `partc run -n 3 {folder}` or `mpiexec -n 3 ...`"
    )


OF_TARGETS = [
    """rank0 (float[n, 3] x, int64[1] at) => (float[n, 3] y) <float[n, 3] h, float[n, 3] k, float[n, 3] s>
    { h = Relu(x)
      g = Gather(x, at)
      s = Add(g, h)
      = partc.comm.Send <peer = 1, tag = 0> (s)
      k = partc.comm.Recv <peer = 1, tag = 1> ()
      y = Add(k, h) }""",
    """rank1 () => () <float[n, 3] s, float[n, 3] k>
    { s = partc.comm.Recv <peer = 0, tag = 0> ()
      k = Neg(s)
      = partc.comm.Send <peer = 0, tag = 1> (k) }""",
]


def test_targets_run_beside_messages_and_their_failures_are_told(one_job: subprocess.CompletedProcess[str]) -> None:
    """What is picked on the second target is sent by the first one; a failure there is told on both ranks."""
    lines = [line.removeprefix("targets ") for line in one_job.stdout.splitlines() if line.startswith("targets")]
    assert sorted(lines) == [
        "0 rank 0 failed in Gather (net.g)",
        "0 {'cuda': Copies(number=60, bytes=2760), 'cpu': Copies(number=30, bytes=360)} [-35.0, -36.0, -37.0]",
        "1 rank 0 failed in Gather (net.g)",
        "1 {} ",
    ], one_job.stderr


def test_a_rank_takes_calls_of_one_thread_at_a_time(one_job: subprocess.CompletedProcess[str]) -> None:
    """Those of another thread are refused, for no rank knows the order of another one's threads; the step goes on."""
    said = sorted(line for line in one_job.stdout.splitlines() if line.startswith("threads"))
    assert len(said) == 3
    for line in said[:2]:
        assert "while another thread is in a step" in line, line
        assert "taken" not in line, line
        assert "] 15 " in line, line
    assert "[True, True, True, True, True]" in said[0]
