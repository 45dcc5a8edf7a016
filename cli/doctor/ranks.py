"""One of the ranks that `partc doctor` starts: it connects to the others as a job's ranks do, and rank 0 prints the result as JSON.

The launcher starts it as `python -P -m partc.cli.doctor.ranks FOLDER`; the folder names the job, so that its processes can be found.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time

from partc.cli.job.processes import end_with_parent

_STALL = 20.0
_ROUNDS = 50


def main() -> int:
    """Runs the rank, and returns its exit code."""
    end_with_parent(signal.SIGKILL)
    import mpi4py

    mpi4py.rc.initialize = False
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.mpi_calls import begin, end
    from partc.runtime.communication.mpi_watch import Watch

    watch = Watch(0, _STALL, dict)
    comm = begin(watch)
    transport = MpiTransport(comm, _STALL)
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        transport.all_gather_text("")
        seconds.append(time.perf_counter() - start)
    found = {"ranks": comm.size, "mpi_alone": transport.mpi_alone, "seconds": statistics.median(seconds)}
    transport.close()
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    end(watch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
