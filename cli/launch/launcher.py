"""Finds the launcher of this machine, and writes its command line.

The order of the search: the environment's own mpiexec (which belongs to the MPI library that mpi4py will load), one on the PATH, also by
the names that distributions give MPICH's and Open MPI's, and srun inside a Slurm allocation. Open MPI binds each rank to one core unless
configured otherwise, so all threads of a rank would share that core.
"""

from __future__ import annotations

import enum
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from partc.runtime.errors import UsageError, reason_of
from partc.runtime.files.counted import read_text

_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
_ALLOCATED = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE")
"""Variables of schedulers whose allocation may have several machines."""
_INHERITED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "SLURM_", "PBS_")
_ALLOWS_ROOT = "_ALLOW_RUN_AS_ROOT"
_NAMED = 6
_SESSIONS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""Settings that name the folder of Open MPI's sessions: since version 5, and before."""
_DAEMON_THREADS = "PRTE_MCA_odls_base_max_threads"
"""The threads in which a daemon of Open MPI starts ranks. With any, a daemon of 5.0.11 sometimes does not notice that its processes have
ended, if they live a few milliseconds only (9 of 100 jobs of `hostname` on two hosts), and the job does not end."""
_HOST_FILE = 1 << 20
"""The most bytes of a file of hosts."""
_PROBE = [sys.executable, "-I", "-S", "-c", ""]
"""The process that a host must start to count: the ranks' Python, which may be missing there."""
_ANSWER, _PROBES = 20.0, 16
"""The seconds in which a host must run a process, and the number of hosts that are probed at the same time."""
IN_PROCESS = ", or run all ranks in this process with --in-process"
"""A help text: what a command can do without a launcher."""
WITHOUT_MPI = ", or leave out --mpi"
"""A help text: what `partc verify --mpi` can do without a launcher."""
_NO_MPI = """\
no mpiexec, mpirun or srun found to start the {ranks} ranks
  help: install one with pip install "partc[mpi]"{instead}"""


class Kind(enum.Enum):
    """The families of launchers, which differ in their options."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH"
    SLURM = "Slurm"


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    path: str
    kind: Kind


@dataclass(frozen=True)
class Hosts:
    """The hosts of the ranks: a file of hosts, or a list `a,b`; with neither, this machine or the allocation."""

    file: str | None = None
    names: str | None = None

    @property
    def are_local(self) -> bool:
        """Whether no hosts are named."""
        return self.file is None and self.names is None

    @property
    def are_here(self) -> bool:
        """Whether all ranks go to this machine."""
        return self.are_local and not any(name in os.environ for name in _ALLOCATED)


def find_launcher(ranks: int, instead: str = IN_PROCESS) -> Launcher:
    """Returns the launcher; raises UsageError with the remedies if there is none. `instead`: the remedy of the command."""
    own = str(Path(sys.executable).parent)
    for path, name in itertools.product((own, None), _NAMES):
        found = shutil.which(name, path=path)
        if found is not None:
            return Launcher(found, _kind(found))
    if "SLURM_JOB_ID" in os.environ and (found := shutil.which("srun")) is not None:
        return Launcher(found, Kind.SLURM)
    raise UsageError(_NO_MPI.format(ranks=ranks, instead=instead))


def inherited() -> str:
    """Returns a line of help that names schedulers' and MPI's settings in the environment, maybe those of another job; "" without any."""
    names = sorted(name for name in os.environ if name.startswith(_INHERITED) and _ALLOWS_ROOT not in name)
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"\n  help: the environment has {', '.join(names[:_NAMED])}{more}: `unset` what is left of another job"


def _kind(path: str) -> Kind:
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return Kind.HYDRA
    return Kind.OPEN_MPI if any(word in told for word in ("Open MPI", "OpenRTE", "PRRTE")) else Kind.HYDRA


def command_line(
    launcher: Launcher, ranks: int, hosts: Hosts, extra: Sequence[str], program: Sequence[str]
) -> list[str]:
    """Returns the command that starts `program` on `ranks` ranks; `extra`: the user's own options for the launcher."""
    options = [launcher.path, "-n", str(ranks)]
    if launcher.kind is Kind.OPEN_MPI:
        options += ["--bind-to", "none"] if "--bind-to" not in extra else []
        local = hosts.are_local and "SLURM_JOB_ID" not in os.environ
        options += ["--oversubscribe"] if local and ranks > (os.cpu_count() or 1) else []
        file, names = "--hostfile", "--host"
    elif launcher.kind is Kind.HYDRA:
        file, names = "-f", "-hosts"
    else:
        options += ["--kill-on-bad-exit=1", "--cpu-bind=none"]
        file, names = "--nodefile", "--nodelist"
    options += [file, hosts.file] if hosts.file is not None else []
    options += [names, hosts.names] if hosts.names is not None else []
    return [*options, *extra, *program]


def slots(hosts: Hosts, launcher: Launcher, extra: Sequence[str]) -> tuple[int, Hosts, str] | None:
    """Returns the most ranks that can start on the hosts that answer, these hosts, and a sentence about both; None without a bound.

    Raises UsageError if the slots of a host are not given.
    """
    if hosts.are_local:
        tasks = os.environ.get("SLURM_NTASKS", "")
        return (int(tasks), hosts, f"the allocation has {tasks} tasks") if tasks.isdecimal() else None
    named = _slots_of(hosts)
    if unsaid := [name for name, number in named.items() if not number]:
        fact = f"the slots of host '{unsaid[0]}' are not said, and the number of ranks follows from them"
        raise UsageError(
            f"{fact}\n  help: write {unsaid[0]}:4 in --host, `{unsaid[0]} slots=4` in a host file, or give -n"
        )

    def answers(name: str) -> bool:
        command = command_line(launcher, 1, Hosts(names=f"{name}:{named[name]}"), extra, _PROBE)
        how = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER, check=False)
        try:
            return how(command, env=launch_environment(launcher)).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    with ThreadPoolExecutor(_PROBES) as probes:
        there = [name for name, good in zip(named, probes.map(answers, named), strict=True) if good]
    number = sum(named[name] for name in there)
    silent = [name for name in named if name not in there]
    said = f"the hosts have {number} slots" + (f", without {', '.join(silent)}, which do not answer" if silent else "")
    return number, Hosts(names=",".join(f"{name}:{named[name]}" for name in there)) if silent else hosts, said


def _slots_of(hosts: Hosts) -> dict[str, int]:
    """Maps each host to its number of slots, or to 0 if it is not given."""
    by_host: dict[str, int] = {}
    try:
        lines = [] if hosts.file is None else read_text(hosts.file, _HOST_FILE).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--hostfile {hosts.file}: {reason_of(error)}\n  help: give a text file with a host a line"
        ) from None
    lines = hosts.names.split(",") if hosts.names is not None else lines
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, number = words[0].partition(":")
        said = [number, *(word.removeprefix("slots=") for word in words[1:] if word.startswith("slots="))]
        by_host[name] = by_host.get(name, 0) + next((int(word) for word in said if word.isdecimal()), 0)
    return by_host


def launch_environment(launcher: Launcher, folder: Path | None = None, memory: Path | None = None) -> dict[str, str]:
    """Returns the environment for the launcher; for root it has the two variables that Open MPI requires.

    Variables that the user has set keep their values. `folder`, `memory`: the places of Open MPI's files and of its shared memory, if all
    processes are on this machine.
    """
    environment = dict(os.environ)
    if launcher.kind is not Kind.OPEN_MPI:
        return environment
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment.setdefault(_DAEMON_THREADS, "0")
    if folder is not None and "SLURM_JOB_ID" not in environment:
        for name in _SESSIONS:
            environment.setdefault(name, str(folder))
        if memory is not None:
            environment.setdefault("OMPI_MCA_btl_sm_backing_directory", str(memory))
    return environment
