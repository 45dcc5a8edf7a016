"""Starts MPI for a script that did not do so itself, and watches the start and the end for missing ranks and ranks that still run."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

import mpi4py

from ..job.place import surrounding_job
from ..job.status_board import processes

if TYPE_CHECKING:
    from mpi4py import MPI


def started(stall: float) -> MPI.Intracomm:
    """Starts MPI unless it is started, and returns the communicator of all ranks.

    If this function starts MPI in place of the import of mpi4py.MPI, it also ends MPI at the end of the script; else mpi4py or the script
    does.
    """
    own = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
    if own:
        mpi4py.rc.initialize = False
    from .mpi_calls import begin, end
    from .mpi_watch import Watch

    place = surrounding_job(os.environ)
    watch = Watch(place.rank if place is not None else 0, stall, processes)
    comm = begin(watch)
    if own:
        atexit.register(end, watch)
    return comm
