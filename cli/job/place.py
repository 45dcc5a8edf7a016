"""This process's place in a job whose ranks a launcher has started already, read from the launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_INTERACTIVE_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Place:
    """What a launcher around this process says of it: its rank, and how many there are where it says so."""

    rank: int
    size: int | None


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
    return Place(int(environment.get(rank, "0")), int(size_text) if size_text.isdecimal() else None)
