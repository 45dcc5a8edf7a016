"""Checks the MPI library that mpi4py loads, the launcher that partc uses, whether they match, and whether two ranks connect."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from partc.cli.doctor.finding import FAULT, NOTE, OK, Finding, output_of
from partc.cli.launch.launcher import Hosts, Kind, Launcher, command_line, find_launcher, launch_environment
from partc.cli.launch.run_dir import RunDir
from partc.runtime.errors import UsageError
from partc.runtime.job.place import inherited_variables, is_launched, surrounding_job

_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__)
print(MPI.Get_library_version())
"""
_INSTALL = (
    'pip install "partc[mpi]" installs a library and its launcher into this environment; --in-process needs neither'
)
_VARIABLES = {"OMPI_COMM_WORLD_SIZE": Kind.OPEN_MPI, "PMI_SIZE": Kind.HYDRA}
"""Maps the environment variable in which a launcher gives a process the number of ranks to the launcher's family."""
_RANKS = 2
_START = 60.0
_FAMILIES = (
    (r"Open MPI\)? v?(\d+(?:\.\d+)+)", Kind.OPEN_MPI),
    (r"(?:PRRTE|OpenRTE)\)? v?(\d+(?:\.\d+)+)", Kind.OPEN_MPI),
    (r"MPICH Version:\s*(\d+(?:\.\d+)+)", Kind.HYDRA),
    (r"HYDRA build details:\s*Version:\s*(\d+(?:\.\d+)+)", Kind.HYDRA),
    (r"Intel\(R\) MPI Library.*?(\d+(?:\.\d+)+)", Kind.HYDRA),
    (r"slurm (\d+(?:\.\d+)+)", Kind.SLURM),
)
"""Patterns of the text that a library or launcher prints about itself, each with its family; the group is the version."""


@dataclass(frozen=True)
class _Named:
    """A library or launcher: its family, None where its text is not recognized, and its version, `major.minor`."""

    kind: Kind | None
    version: str

    def __str__(self) -> str:
        return f"{self.kind.value if self.kind else 'unknown MPI'} {self.version}".rstrip()


def _named(text: str) -> _Named:
    for pattern, kind in _FAMILIES:
        if found := re.search(pattern, text, re.DOTALL):
            return _Named(kind, found[1])
    return _Named(None, "")


def mpi() -> Iterator[Finding]:
    """Checks library, launcher, their match, and a job of two ranks on this host."""
    good, text = output_of([sys.executable, "-P", "-W", "ignore", "-c", _LIBRARY])
    library = _named(text) if good else None
    if library is None:
        yield Finding("MPI library", FAULT, f"mpi4py cannot load one: {text}", _INSTALL)
    else:
        version = text.partition("\n")[0]
        yield Finding("MPI library", OK, f"{library}, by mpi4py {version}")
        yield from _surrounding(library)
    try:
        launcher = find_launcher(_RANKS)
    except UsageError as error:
        yield Finding("launcher", FAULT, str(error).splitlines()[0], _INSTALL)
        return
    good, text = output_of([launcher.path, "--version"])
    if not good:
        yield Finding("launcher", FAULT, f"{launcher.path} --version: {text}", _INSTALL)
        return
    starts = _named(text)
    yield Finding("launcher", OK, f"{launcher.path}, {starts}")
    if library is None:
        return
    # srun starts ranks of any library, and an unknown kind cannot be checked
    is_known = None not in (library.kind, starts.kind) and starts.kind is not Kind.SLURM
    if is_known and library.kind is not starts.kind:
        yield Finding(
            "launcher",
            FAULT,
            f"{launcher.path} is of {starts}, mpi4py loads {library}: each process would be a job of its own",
            f"take the launcher of the library that mpi4py loads: put its folder first in PATH, or {_INSTALL}",
        )
        return
    yield from _meeting(launcher)


def _surrounding(library: _Named) -> Iterator[Finding]:
    """Checks the launcher that started this process: whether it belongs to another MPI than the library."""
    place = surrounding_job(os.environ)
    if place is not None and not is_launched():
        fact, _, help = inherited_variables(os.environ, place).partition("\n  help: ")
        yield Finding("launcher", FAULT, fact, help)
        return
    if place is None or "SLURM_PROCID" in os.environ or place.variable not in _VARIABLES:
        return
    if library.kind not in (None, _VARIABLES[place.variable]):
        yield Finding(
            "launcher",
            FAULT,
            f"this process was started by that of {place.launcher}, mpi4py loads {library}",
            f"take the launcher of the library that mpi4py loads, or start partc without one; {_INSTALL}",
        )


def _meeting(launcher: Launcher) -> Iterator[Finding]:
    """Checks whether two ranks start, connect, and share memory."""
    with RunDir(_RANKS) as run_dir:
        program = [sys.executable, "-P", "-m", "partc.cli.doctor.ranks", str(run_dir.folder)]
        command = command_line(launcher, _RANKS, Hosts(), (), program)
        if launcher.kind is Kind.OPEN_MPI and "--oversubscribe" not in command:
            command.insert(1, "--oversubscribe")
        begun = time.monotonic()
        environment = {**launch_environment(launcher, run_dir.folder, run_dir.memory), "TMPDIR": str(run_dir.folder)}
        good, text = output_of(command, _START, environment)
        seconds = time.monotonic() - begun
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not good or not lines:
        yield Finding(
            "two ranks",
            FAULT,
            f"they did not begin: {text}",
            f"run `{launcher.path} -n 2 hostname` to see what the launcher itself says; {_INSTALL}",
        )
        return
    report = json.loads(lines[0])
    if report["ranks"] != _RANKS:
        yield Finding(
            "two ranks",
            FAULT,
            f"each found itself alone: {launcher.path} is not of the library that mpi4py loads",
            f"put the library's own launcher first in PATH, or {_INSTALL}",
        )
        return
    yield Finding(
        "two ranks", OK, f"met, and ended after {seconds:.1f} s; an exchange takes {report['seconds'] * 1e6:.0f} us"
    )
    if report["mpi_alone"]:
        if "PARTC_" in report["mpi_alone"]:
            remedy = "unset it"
        elif os.path.exists("/.dockerenv"):
            remedy = "allow memfd_create, futex and /proc/PID/fd in the container (its seccomp profile), or run all ranks in one container"
        else:
            remedy = "slower, and right: messages and sums go over MPI"
        yield Finding("two ranks", NOTE, f"they share no memory but MPI's: {report['mpi_alone']}", remedy)
