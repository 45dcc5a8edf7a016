"""This process's place in a job whose ranks a launcher has started already, read from the launcher's environment variables.

A launcher and an MPI library find each other by PMI, PMIx or a library's own protocol. Where they are of different kinds, each process
begins MPI as a job of one rank, although the launcher says that there are more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import UsageError

_INTERACTIVE_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Place:
    """What a launcher around this process says of it: its rank, and how many there are where it says so."""

    rank: int
    size: int | None
    variable: str = field(default="", compare=False)
    """The environment variable that says how many ranks there are."""


def surrounding_job(environment: Mapping[str, str]) -> Place | None:
    """This process's place in a job of ranks that someone else started, or None outside of any."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _place(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if "PMI_RANK" in environment:
        return _place(environment, "PMI_RANK", "PMI_SIZE")
    step, tasks = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NUM_TASKS", "1")
    if step.isdecimal() and int(step) < _INTERACTIVE_STEP and tasks.isdecimal() and int(tasks) > 1:
        return _place(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if "PMIX_RANK" in environment and "SLURM_JOB_ID" not in environment:
        return _place(environment, "PMIX_RANK", "")
    return None


def _place(environment: Mapping[str, str], rank: str, size: str) -> Place:
    size_text = environment.get(size, "")
    return Place(int(environment.get(rank, "0")), int(size_text) if size_text.isdecimal() else None, size)


def refuse_alone(environment: Mapping[str, str], size: int, library: str) -> None:
    """UsageError where the launcher started several ranks and `library`, the MPI library that was loaded, found one.

    `size`: the ranks that the library found.
    """
    place = surrounding_job(environment)
    if size > 1 or place is None or place.size is None or place.size == 1:
        return
    help = f'help: start with the launcher of {library}, or pip install "partc[mpi]", which brings a library and its launcher'
    if "SLURM_PROCID" in environment:
        help = f"help: srun --mpi=pmix, or another of `srun --mpi=list` that {library} knows"
    raise UsageError(
        f"the launcher started {place.size} processes ({place.variable}={place.size}), and the MPI library that mpi4py loads, {library}, "
        f"finds one: the launcher is of another MPI\n  {help}; `partc doctor` shows both"
    )
