"""This process's place in a job whose ranks a launcher has started already, read from the launcher's environment variables.

A launcher and an MPI library find each other by PMI, PMIx or a library's own protocol. If they are of different kinds, each process begins
MPI as a job of one rank, although the launcher has started more, or the library ends the process.

    variable                     set by the launcher of
    OMPI_COMM_WORLD_SIZE         Open MPI, together with PMIX_RANK
    PMI_SIZE                     MPICH and those of its family (Hydra)
    SLURM_STEP_NUM_TASKS         Slurm; with --mpi=pmix PMIX_RANK, with --mpi=pmi2 PMI_SIZE, too
    PMIX_RANK                    any other that speaks PMIx, such as PRRTE's
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError

_INTERACTIVE_STEP = 0xFFFFFFF0
_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPICH or one of its family",
    "SLURM_STEP_NUM_TASKS": "Slurm",
    "PMIX_RANK": "PMIx",
}
"""Maps each variable to the launcher that sets it."""


_PROGRAMS = re.compile(
    r"mpiexec|mpirun|orterun|orted|prte|prun$|hydra|pmi_proxy|mpispawn|srun|slurmstepd|pals|aprun|apinit|jsrun|jsm|flux-|pbs_|poe$"
)
"""The prefixes of the names of launchers' programs that start ranks."""
_FAMILIES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_STEP", "SLURM_PROCID")
"""The prefixes of the variables that give a process its place, or the launcher's server."""


@dataclass(frozen=True)
class Place:
    """The launcher's data about this process: its rank, and the number of ranks if it is given."""

    rank: int
    size: int | None
    variable: str = field(default="", compare=False)
    """The environment variable that gives the number of ranks, or shows that there are several."""

    @property
    def launcher(self) -> str:
        """The launcher by its variable, with the variable's value."""
        said = f"{self.variable}={self.rank if self.size is None else self.size}"
        return f"{_LAUNCHERS[self.variable]} ({said})"


def surrounding_job(environment: Mapping[str, str]) -> Place | None:
    """Returns this process's place in a job of ranks that a launcher has started, or None outside of any."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _place(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if "PMI_RANK" in environment:
        size = "SLURM_STEP_NUM_TASKS"  # srun --mpi=pmi2, unless the ranks are those of a launcher that srun has started
        is_slurm = environment.get(size) == environment.get("PMI_SIZE", "")
        return _place(environment, "PMI_RANK", size if is_slurm else "PMI_SIZE")
    step, tasks = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NUM_TASKS", "1")
    if step.isdecimal() and int(step) < _INTERACTIVE_STEP and tasks.isdecimal() and int(tasks) > 1:
        return _place(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if "PMIX_RANK" in environment and "SLURM_JOB_ID" not in environment:
        return Place(int(environment["PMIX_RANK"]), None, "PMIX_RANK")
    return None


def _place(environment: Mapping[str, str], rank: str, size: str) -> Place:
    size_text = environment.get(size, "")
    return Place(int(environment.get(rank, "0")), int(size_text) if size_text.isdecimal() else None, size)


def is_launched() -> bool:
    """Whether a launcher is among the ancestors of this process; also True if the system does not tell."""
    pid = os.getppid()
    is_known = pid > 0
    while pid > 0:
        try:
            name, _, fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(") ")
            pid = int(fields.split()[1])
        except (OSError, ValueError, IndexError):
            return True
        if _PROGRAMS.match(name):
            return True
    return not is_known


def refuse_inherited(environment: Mapping[str, str]) -> None:
    """Raises UsageError if the variables of PMIx name no server: there is no launcher, and MPI would end the process as it begins."""
    has_server = any(name.startswith("PMIX_SERVER_URI") for name in environment)
    if "PMIX_RANK" in environment and not has_server and (place := surrounding_job(environment)) and not is_launched():
        raise UsageError(inherited_variables(environment, place))


def inherited_variables(environment: Mapping[str, str], place: Place) -> str:
    """Returns the message for variables of a job whose launcher has not started this process."""
    names = sorted(name for name in environment if name.startswith(_FAMILIES))
    return (
        f"the environment has variables of a job of {place.launcher}, and no launcher is among the processes that have started this one"
        f"\n  the variables are left of another job: {', '.join(names)}\n  help: unset {' '.join(names)}"
    )


def refuse_alone(environment: Mapping[str, str], size: int, library: str, launched: bool = True) -> None:
    """Raises UsageError if the launcher started several ranks and `library`, the loaded MPI library, found one.

    `size`: the ranks that the library found; `launched`: whether there is a launcher at all.
    """
    place = surrounding_job(environment)
    # Without a size, a rank that is not the first one shows that there are others.
    if size > 1 or place is None or (place.rank == 0 if place.size is None else place.size == 1):
        return
    if not launched:
        raise UsageError(inherited_variables(environment, place))
    started = "several" if place.size is None else str(place.size)
    raise UsageError(
        f"the launcher of {place.launcher} started {started} processes, and the MPI library that mpi4py loads, {library}, "
        f"finds one: the launcher is of another MPI\n  {_remedy(environment, library)}"
    )


def refuse_pmix(environment: Mapping[str, str], about: str) -> None:
    """Raises UsageError if the library, by its own text `about`, ends every process whose launcher gives its place by PMIx.

    MPICH does so when it begins, with a message that names neither, unless it was built with PMIx or finds PMI, its own protocol.
    """
    place, version = surrounding_job(environment), re.match(r"MPICH Version:\s*(\S+)", about)
    if version is None or "pmix" in about or "PMIX_NAMESPACE" not in environment or "PMI_RANK" in environment:
        return
    library = f"MPICH {version[1]}"
    launcher = "PMIx (PMIX_NAMESPACE)" if place is None else place.launcher
    raise UsageError(
        f"the launcher of {launcher} started this process, and the MPI library that mpi4py loads, {library}, "
        f"cannot begin under it: it was built without PMIx\n  {_remedy(environment, library)}"
    )


def _remedy(environment: Mapping[str, str], library: str) -> str:
    if "SLURM_PROCID" in environment:
        protocol = "pmi2" if library.startswith(("MPICH", "Intel")) else "pmix"
        return f"help: srun --mpi={protocol}, or another of `srun --mpi=list` that {library} knows; `partc doctor` shows the library"
    return (
        f'help: start with the launcher of {library}, or pip install "partc[mpi]", which brings a library and its launcher; '
        "`partc doctor` shows both"
    )
