"""Runs a job whose rank 0 prints the result of all ranks, as one line of JSON."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partc.cli.doctor.machine import output_of
from partc.cli.job.processes import end_with_parent
from partc.cli.launch.launcher import Hosts, Kind, command_line, find_launcher, launch_environment
from partc.cli.launch.run_dir import RunDir
from partc.runtime.communication.transport import Transport
from partc.runtime.errors import PartcError, RankError

_LONGEST, _STALL = 600.0, 60.0
_FAILURE = "failure"


def result_of_module(module: str, folder: Path, ranks: int) -> dict[str, Any]:
    """Runs a module with `ranks` ranks on this host and the folder as its argument; returns its result. Raises RankError where it fails."""
    launcher = find_launcher(ranks, instead="")
    with RunDir(ranks) as run_dir:
        command = command_line(launcher, ranks, Hosts(), (), [sys.executable, "-P", "-m", module, str(folder)])
        if launcher.kind is Kind.OPEN_MPI and "--oversubscribe" not in command:
            command.insert(1, "--oversubscribe")
        environment = {**launch_environment(launcher, run_dir.folder, run_dir.memory), "TMPDIR": str(run_dir.folder)}
        good, text = output_of(command, _LONGEST, environment)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not good or not lines:
        raise RankError(f"the ranks failed: {text}\n  help: see what `partc doctor` says")
    found: dict[str, Any] = json.loads(lines[0])
    if _FAILURE in found:
        raise RankError(f"the ranks failed: {found[_FAILURE]}")
    return found


def report(find: Callable[[Transport], Mapping[str, Any]]) -> int:
    """Runs `find` on this rank, as every rank of such a job does, and prints its result on rank 0; returns the exit code."""
    end_with_parent(signal.SIGKILL)
    import mpi4py

    mpi4py.rc.initialize = False
    from partc.runtime.communication.mpi import MpiTransport
    from partc.runtime.communication.mpi_calls import begin, end
    from partc.runtime.communication.mpi_watch import Watch

    watch = Watch(0, _STALL, dict)
    transport = MpiTransport(begin(watch), _STALL)
    try:
        found = find(transport)
    except PartcError as error:  # the other ranks have it, too
        found = {_FAILURE: str(error).partition("\n")[0]}
    transport.close()
    if transport.rank == 0:
        print(json.dumps(found), flush=True)
    end(watch)
    return 0
