"""`partc doctor`: each fault is planted, and found with its remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from artifact_edit import chain
from click.shell_completion import BashComplete
from partc.cli.doctor import machine
from partc.cli.doctor.machine import FAULT, NOTE, OK, Finding
from partc.cli.main import invoke, partc
from partc.runtime.devices.devices import gpus
from partc.runtime.errors import UsageError
from partc.runtime.job.place import refuse_alone, refuse_pmix


def wrong(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    return [one for one in check() if one.state != OK]


def only(check: Callable[[], Iterator[Finding]], state: str, text: str, remedy: str) -> None:
    found = wrong(check)
    assert [one.state for one in found] == [state]
    assert text in found[0].text
    assert remedy in found[0].remedy


def test_a_machine_on_which_jobs_run_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    seen = defaultdict[str, str](str)  # of packages that are optional and missing there is a finding each
    for one in document["findings"]:
        if one["state"] != FAULT:
            seen[one["about"]] += f"{one['text']}\n"
    assert seen.keys() >= {
        "python",
        "packages",
        "cores",
        "memory",
        "temporary",
        "onnxruntime",
        "MPI library",
        "launcher",
    }
    assert "met, and ended" in seen["two ranks"]
    assert f"onnx {metadata.version('onnx')}" in seen["packages"]


def test_no_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    only(machine.mpi, FAULT, "/nonexistent/libmpi.so", "partc[mpi]")


def test_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(machine.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [one for one in wrong(machine.mpi) if one.about == "launcher"]
    assert found[0].state == FAULT
    assert "no mpiexec" in found[0].text


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("echo 'HYDRA build details:'; echo '    Version:      5.0.2'", "MPICH 5.0.2, mpi4py loads"),
        ("echo 'Intel(R) MPI Library for Linux* OS, Version 2021.13'", "MPICH 2021.13, mpi4py loads"),
        ("echo 'cannot be loaded' >&2; exit 127", "--version: cannot be loaded"),
    ],
)
def test_a_launcher_of_another_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, text: str) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/sh\n{says}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(machine, "find_launcher", lambda ranks: machine.Launcher(str(launcher), machine.Kind.HYDRA))
    monkeypatch.setattr(machine, "output_of", _told_of_open_mpi(machine.output_of))
    only(machine.mpi, FAULT, text, "partc[mpi]")


def _told_of_open_mpi(other: Callable[..., tuple[bool, str]]) -> Callable[..., tuple[bool, str]]:
    """The library is Open MPI, whatever this machine has; what launchers say is read from them."""

    def output_of(command: list[str], *rest: object) -> tuple[bool, str]:
        return (True, "4.1.2\nOpen MPI v5.0.11, package") if command[0] == sys.executable else other(command, *rest)

    return output_of


@pytest.mark.parametrize(
    ("environment", "size", "text"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "5"}, 1, "PMI_SIZE=5"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 1, "OMPI_COMM_WORLD_SIZE=2"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 1, "--mpi=pmix"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
            1,
            "of Slurm (SLURM_STEP_NUM_TASKS=4)",
        ),
        ({"PMI_RANK": "1"}, 1, "MPICH or one of its family"),
        ({"PMIX_RANK": "2"}, 1, "of PMIx (PMIX_RANK=2) started several processes"),
        ({"PMIX_RANK": "0"}, 1, ""),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1, ""),
        ({"PMI_RANK": "1", "PMI_SIZE": "5"}, 5, ""),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 1, ""),
        ({}, 1, ""),
    ],
)
def test_ranks_that_each_find_themselves_alone_are_refused(environment: dict[str, str], size: int, text: str) -> None:
    if not text:
        refuse_alone(environment, size, "Open MPI 5.0.11")
        return
    with pytest.raises(UsageError, match="Open MPI") as error:
        refuse_alone(environment, size, "Open MPI 5.0.11")
    assert text in str(error.value)


MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-pm=hydra"
UNDER_PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job@1"}
SLURM_STEP = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "about", "texts"),
    [
        (UNDER_PMIX, MPICH, ["of PMIx (PMIX_RANK=0)", "MPICH 5.0.2, cannot begin", "the launcher of MPICH 5.0.2"]),
        (UNDER_PMIX | {"OMPI_COMM_WORLD_SIZE": "2"}, MPICH, ["of Open MPI (OMPI_COMM_WORLD_SIZE=2)"]),
        (UNDER_PMIX | SLURM_STEP, MPICH, ["of Slurm (SLURM_STEP_NUM_TASKS=2)", "srun --mpi=pmi2"]),
        (UNDER_PMIX | {"SLURM_JOB_ID": "3"}, MPICH, ["of PMIx (PMIX_NAMESPACE)"]),
        (UNDER_PMIX | {"PMI_RANK": "0"}, MPICH, []),
        (UNDER_PMIX, MPICH + " --with-pmix=/usr", []),
        (UNDER_PMIX, "Open MPI v5.0.11", []),
        ({}, MPICH, []),
    ],
)
def test_an_mpich_without_pmix_is_not_begun_under_it(environment: dict[str, str], about: str, texts: list[str]) -> None:
    if not texts:
        refuse_pmix(environment, about)
        return
    with pytest.raises(UsageError) as error:
        refuse_pmix(environment, about)
    assert all(text in str(error.value) for text in texts), error.value


@pytest.mark.parametrize(
    ("environment", "launched", "text"),
    [
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            False,
            "a job of MPICH or one of its family (PMI_SIZE=2), and no launcher",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            True,
            "that of MPICH or one of its family (PMI_SIZE=2), mpi4py loads Open MPI",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True, ""),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0"}, True, ""),
    ],
)
def test_the_launcher_that_started_doctor(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], launched: bool, text: str
) -> None:
    monkeypatch.setattr(machine, "is_launched", lambda: launched)
    monkeypatch.setattr(machine, "output_of", _told_of_open_mpi(machine.output_of))
    monkeypatch.setattr(machine, "find_launcher", lambda ranks: machine.Launcher("/nonexistent", machine.Kind.OPEN_MPI))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    about = [one.text for one in wrong(machine.mpi) if re.search("started by|has variables", one.text)]
    assert [text in one for one in about] == [True] * bool(text)


def test_ranks_whose_launcher_is_of_another_mpi_say_so_once(tmp_path: Path) -> None:
    script = "from partc.runtime import load\nload('nowhere')\n"
    environment = {**os.environ, "PMI_RANK": "0", "PMI_SIZE": "3"}
    for name in [name for name in environment if name.startswith(("OMPI_", "PMIX_"))]:
        del environment[name]
    launcher = tmp_path / "mpiexec"  # whose process has its name
    launcher.write_text(f'#!/bin/sh\n"{sys.executable}" -c "$1"\nexit $?\n')
    launcher.chmod(0o755)
    ended = subprocess.run(
        [launcher, script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "UsageError: the launcher of MPICH or one of its family (PMI_SIZE=3) started 3 processes" in ended.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {"PMI_SIZE": "5", "PMI_RANK": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "3"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job@1"},
    ],
)
def test_variables_of_a_job_without_its_launcher_are_named(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)  # what runs the tests may have been started by a launcher
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert invoke(["run", str(chain(tmp_path / "build")), "--random", "1"]) == 2
    err = capsys.readouterr().err
    assert "no launcher is among the processes that have started this one" in err
    assert err.endswith(f"help: unset {' '.join(sorted(variables))}\n")


def test_one_core() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        only(machine.cores, NOTE, "1", "take turns")
    finally:
        os.sched_setaffinity(0, before)


def test_little_shared_memory() -> None:
    script = (
        "from partc.cli.doctor import machine\nprint([one.text for one in machine.memory() if one.state == 'note'])"
    )
    mounted = f'mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77; exec {sys.executable} -c "$0"'
    if shutil.which("unshare") is None:
        pytest.skip("no unshare, by which a test has a /dev/shm of its own")
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", mounted, script], capture_output=True, text=True, check=False)
    if ended.returncode in (1, 77) and "Operation not permitted" in ended.stderr:
        pytest.skip("this machine allows no mounts of a process's own")
    assert "/dev/shm has 64.0 KiB free of 64.0 KiB" in ended.stdout, ended.stderr


def test_temporary_files_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    only(machine.temporary, FAULT, "no temporary file can be written", "TMPDIR")


def test_few_open_files() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        only(machine.limits, FAULT, "200 open files", "ulimit -n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_packages_that_are_missing_or_older_than_tested_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["click>=900", "surely-not-there>=1.2", "numpy>=1", "unused>=3; extra == 'torch'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda name: needs)
    found = [one for one in machine.packages() if one.state == FAULT]
    assert [one.remedy for one in found] == ['pip install "surely-not-there>=1.2" "click>=900"']
    assert found[0].text.startswith("surely-not-there is missing; click is ")


def test_a_gpu_that_onnxruntime_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    if gpus():
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    only(machine.providers, NOTE, "1 GPU; ", "--device cuda=cpu")


@pytest.mark.parametrize("lacks", ["", "No module named 'cupy'"])
def test_what_carries_values_between_gpus(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    answer = json.dumps({"version": "1.31.1", "known": known, "used": known, "error": ""})
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    monkeypatch.setattr(machine, "output_of", lambda *_: (True, answer))
    monkeypatch.setattr(machine, "gpu", lambda device: ("" if lacks else f"host {device}", lacks))
    found = {one.about: one for one in machine.providers()}
    assert found["GPU"].text == "2 GPUs usable"
    assert found["NCCL"].state == (NOTE if lacks else OK)
    assert found["NCCL"].text.endswith(lacks)
    assert found["NCCL"].remedy == ('pip install "partc[nccl]"' if lacks else "")


def test_a_check_that_fails_is_a_finding_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from partc.cli.commands import doctor

    def broken() -> Iterator[Finding]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", (broken, machine.temporary))
    assert invoke(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fault broken: could not be looked at: RuntimeError: no such thing" in out
    assert "ok    temporary: " in out
    assert out.endswith("1 fault, 0 notes\n")


def test_the_shell_completes_commands_and_options() -> None:
    shell = BashComplete(partc, {}, "partc", "_PARTC_COMPLETE")

    def completed(*words: str) -> list[str]:
        return [one.value for one in shell.get_completions(list(words[:-1]), words[-1])]

    assert completed("co") == ["compile"]
    assert completed("compile", "--pl") == ["--plan"]
    assert "--json" in completed("doctor", "--")
