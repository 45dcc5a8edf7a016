"""Begins MPI for a script that has not done so itself, with a watch on what may take long: ranks that have not come, or have not ended."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

import mpi4py

from ..job.status_board import processes

if TYPE_CHECKING:
    from mpi4py import MPI

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def started(stall: float) -> MPI.Intracomm:
    """The communicator of all ranks. Where the import of mpi4py.MPI has begun MPI, it ends MPI, too; else the end of the script does."""
    own = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
    if own:
        mpi4py.rc.initialize = False
    from .mpi_calls import begin, end
    from .mpi_watch import Watch

    told = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()), "0")
    watch = Watch(int(told), stall, processes)
    comm = begin(watch)
    if own:
        atexit.register(end, watch)
    return comm
