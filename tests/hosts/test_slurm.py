"""Jobs under Slurm: each way to start one has the numbers of an undisturbed training, or is refused by name; none hangs.

PARTC_SLURM=install python -m pytest -q -p no:xdist tests/hosts/test_slurm.py     # as root; installs what is missing, by apt
PARTC_SLURM=1 python -m pytest -q -p no:xdist tests/hosts/test_slurm.py           # with an installed Slurm
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from partc.runtime.checkpoint.newest import latest
from slurm_node import SLOTS, Slurm, Unavailable, cluster
from training_command_case import MODEL, TRAIN, built, tensors, train
from waiting import until

_SWITCH = os.environ.get("PARTC_SLURM", "")
pytestmark = pytest.mark.skipif(
    not _SWITCH, reason="Slurm is tried with PARTC_SLURM=1, or =install (see tests/hosts/test_slurm.py)"
)
PLAN = "ranks: 4\nmesh: {dp: 4}\ndataset: data_parallel\nsymbols: {batch: {divisor: 4}}\n" + TRAIN
SHORT, FULL = 4, 2000
"""Epochs, of five steps each, of a training that runs to its end, and of one that is interrupted."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        with cluster(tmp_path_factory.mktemp("slurm"), install=_SWITCH == "install") as running:
            yield running
    except Unavailable as reason:
        pytest.skip(f"no Slurm here: {reason}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compiled training, and the checkpoints of an undisturbed one of each length."""
    place = tmp_path_factory.mktemp("training")
    random = np.random.default_rng(1)
    x = random.standard_normal((60, 12)).astype(np.float32)
    np.savez(place / "data.npz", x=x, label=x[:, :6].argmax(1).astype(np.int64))
    (place / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        built(place, PLAN)
        for epochs in (SHORT, FULL):
            assert train("build", "--checkpoint", f"whole{epochs}", "--epochs", str(epochs), "--save", "9999") == 0
        yield place


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables by which mpi4py loads MPICH, whose wheel is installed into a folder of its own."""
    place = tmp_path_factory.mktemp("mpich")
    options = ["--quiet", "--no-deps", "--ignore-installed", "--prefix", str(place), "mpich"]
    if subprocess.run([sys.executable, "-m", "pip", "install", *options], check=False, capture_output=True).returncode:
        pytest.skip("the wheel of MPICH is not to be had here")
    return {"MPI4PY_LIBMPI": str(next(place.glob("lib/libmpi.so.*")))}


def line(name: str, *words: str, epochs: int = SHORT) -> list[str]:
    """The command of a training with checkpoints in a folder of that name."""
    begin = [sys.executable, "-m", "partc.cli", "train", "build", "--plan", "build.yaml", "--threads", "1"]
    return [*begin, "--checkpoint", name, "--epochs", str(epochs), "--log", "999", "--resume", "auto", *words]


def script(folder: Path, name: str, *options: str, last: str) -> list[str]:
    """The command that submits a batch script with these last lines."""
    (folder / f"{name}.sh").write_text(f"#!/bin/sh\n{last}\n")
    return ["sbatch", "--parsable", f"--output={name}.out", "--open-mode=append", *options, f"{name}.sh"]


def is_undisturbed(folder: Path, name: str, epochs: int = SHORT) -> bool:
    return tensors(folder / name) == tensors(folder / f"whole{epochs}")


def submitted(slurm: Slurm, command: list[str]) -> str:
    """The number of a job that was submitted."""
    done = slurm.run(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(slurm: Slurm, number: str) -> dict[str, str]:
    """A job after its end."""
    until(lambda: slurm.job(number)["JobState"] in ENDED)
    return slurm.job(number)


def has_saved(folder: Path, name: str, since: int = -1) -> bool:
    """Whether there is a checkpoint of a later step."""
    newest = latest(folder / name)
    return newest is not None and int(newest.name[5:]) > since


@pytest.mark.parametrize("way", ["salloc", "sbatch", "srun"])
def test_each_way_to_start_a_job_has_the_numbers_of_one_without_slurm(slurm: Slurm, folder: Path, way: str) -> None:
    words = line(way)
    commands = {
        "salloc": ["salloc", "--quiet", "--ntasks=4", *words],
        "sbatch": script(folder, way, "--ntasks=4", "--wait", last=f"exec {shlex.join(words)}"),
        "srun": ["srun", "--ntasks=4", "--mpi=pmix", *words],
    }
    done = slurm.run(*commands[way])
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_undisturbed(folder, way)


def test_mpich_begins_by_pmi2(slurm: Slurm, folder: Path, mpich: dict[str, str]) -> None:
    done = slurm.run("srun", "--ntasks=4", "--mpi=pmi2", *line("mpich"), also=mpich)
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_undisturbed(folder, "mpich")


@pytest.mark.parametrize(("library", "protocol"), [("openmpi", "none"), ("openmpi", "pmi2"), ("mpich", "none")])
def test_a_protocol_that_the_library_does_not_speak_is_refused(
    slurm: Slurm, folder: Path, mpich: dict[str, str], library: str, protocol: str
) -> None:
    also = mpich if library == "mpich" else {}
    done = slurm.run("srun", "--ntasks=4", f"--mpi={protocol}", *line(f"{library}.{protocol}"), also=also)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the launcher of Slurm (SLURM_STEP_NUM_TASKS=4) started 4 processes" in done.stderr
    assert f"help: srun --mpi={'pmi2' if library == 'mpich' else 'pmix'}" in done.stderr
    assert not (folder / f"{library}.{protocol}").exists()


def test_each_job_of_an_array_trains_for_itself(slurm: Slurm, folder: Path) -> None:
    last = f"exec {shlex.join(line('NAME')).replace('NAME', 'array.$SLURM_ARRAY_TASK_ID')}"
    done = slurm.run(*script(folder, "array", "--ntasks=4", "--array=0-2", "--wait", last=last))
    assert done.returncode == 0, done.stderr
    assert all(is_undisturbed(folder, f"array.{k}") for k in range(3))


def test_the_signal_before_the_end_of_the_time_saves(slurm: Slurm, folder: Path) -> None:
    """Slurm looks each half minute for jobs whose time ends; the training is long enough for that."""
    last = f"exec {shlex.join(line('signal', epochs=100 * FULL))}"
    number = submitted(slurm, script(folder, "signal", "--ntasks=4", "--time=2", "--signal=B:USR1@50", last=last))
    job = ended(slurm, number)
    assert job["ExitCode"] == "75:0", job
    assert "stopped by SIGUSR1 after step" in (folder / "signal.out").read_text()
    assert has_saved(folder, "signal")


def resumed(folder: Path, name: str) -> int:
    """How many times a job has gone on from a checkpoint."""
    return (folder / f"{name}.out").read_text().count("resumes after step")


@pytest.mark.parametrize("way", ["killed", "asked"])
def test_a_job_that_is_requeued_three_times_ends_as_an_undisturbed_one(slurm: Slurm, folder: Path, way: str) -> None:
    """A preempted job is killed and requeued; one that has a minute and a signal saves, and its script requeues it."""
    command, options = line(way, "--save", "100", epochs=FULL), [f"--ntasks={SLOTS}", "--requeue"]
    last = f"exec {shlex.join(command)}"
    if way == "asked":
        options += ["--partition=patient", "--signal=USR1@60"]
        last = f"srun --ntasks=4 --mpi=pmix {shlex.join(command)}\ncode=$?\n[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID\nexit $code"
    number = submitted(slurm, script(folder, way, *options, last=last))
    step = -1
    for times in (1, 2, 3):
        until(lambda known=step, last=times - 1: has_saved(folder, way, known) and resumed(folder, way) == last)
        newest = latest(folder / way)
        assert newest is not None
        step = int(newest.name[5:])
        urgent = submitted(slurm, script(folder, "urgent", "--partition=urgent", f"--ntasks={SLOTS}", last="true"))
        until(lambda count=times: slurm.job(number)["Restarts"] == str(count))
        assert ended(slurm, urgent)["ExitCode"] == "0:0"
        until(lambda: slurm.job(number)["JobState"] == "PENDING")
        slurm.run(
            "scontrol", "update", f"jobid={number}", "starttime=now+3"
        )  # else in two minutes; at once it is refused
        until(lambda: slurm.job(number)["JobState"] in ("RUNNING", *ENDED))
    assert ended(slurm, number)["ExitCode"] == "0:0"
    assert resumed(folder, way) == 3
    said = (folder / f"{way}.out").read_text()
    assert said.count("stopped by SIGUSR1 after step") == (3 if way == "asked" else 0)
    assert is_undisturbed(folder, way, FULL)


def test_a_job_that_outgrows_its_memory_ends_with_words(slurm: Slurm, folder: Path) -> None:
    command = line("memory", epochs=100 * FULL)
    number = submitted(slurm, script(folder, "memory", "--ntasks=4", "--mem=100M", last=f"exec {shlex.join(command)}"))
    assert ended(slurm, number)["ExitCode"] == "0:9"
    assert "exceeded memory limit" in (folder / "memory.out").read_text()
    until(lambda: not processes("memory"))


@pytest.mark.parametrize("way", ["batch", "step", "asked"])
def test_a_cancelled_job_says_where_it_goes_on_and_leaves_no_process(slurm: Slurm, folder: Path, way: str) -> None:
    """scancel signals all processes: steps save; the launcher of a batch script ends its ranks before they have, unless it is not asked."""
    name = f"cancelled.{way}"
    command = line(name, "--save", "100", epochs=100 * FULL)
    command = ["srun", "--mpi=pmix", *command] if way == "step" else command
    number = submitted(slurm, script(folder, name, "--ntasks=4", last=f"exec {shlex.join(command)}"))
    until(lambda: has_saved(folder, name))
    options = ["--batch", "--signal=TERM"] if way == "asked" else []
    assert slurm.run("scancel", *options, number).returncode == 0
    assert ended(slurm, number)["JobState"] == ("FAILED" if way == "asked" else "CANCELLED")
    until(lambda: not processes(name))
    text = (folder / f"{name}.out").read_text()
    assert "stopped by SIGTERM after step" in text
    assert (": saved in" in text) is (way != "batch")
    assert "--resume auto goes on from" in text


def processes(name: str) -> list[str]:
    """The processes of a training whose checkpoints have that name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().decode(errors="replace")
            found += [text] if "train" in text and name in text else []
    return found
