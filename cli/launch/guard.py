"""A small process that outlives partc: if partc is killed, it ends the job and removes its folders.

Its input is a pipe whose other end only partc has. It reads the launcher's process id and the folders, one in each line, until the pipe
ends. If the folders no longer exist then, partc has ended normally. It imports little, since it starts with every job, and has its own
session, so that signals to partc's process group do not reach it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_POLITE = 1.0
_PATIENCE = 5.0
_POLL = 0.02


def main() -> None:
    """Waits for the end of partc, then ends its job."""
    lines = sys.stdin.read().splitlines()
    folders = [line for line in lines if not line.isdigit()]
    launcher = max((int(line) for line in lines if line.isdigit()), default=0)
    if not any(map(os.path.isdir, folders)):
        return
    _end(launcher, signal.SIGTERM)
    until = time.monotonic() + _POLITE
    while time.monotonic() < until and _naming(folders):
        time.sleep(_POLL)
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and (left := _naming(folders)):
        _end(launcher, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(launcher: int, number: int) -> None:
    """Sends a signal to the launcher's process group, if it still exists."""
    if launcher:
        with contextlib.suppress(OSError):
            os.killpg(launcher, number)


def _naming(folders: list[str]) -> list[int]:
    """Returns the processes with one of the folders in their command line."""
    processes = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as stream:
                line = stream.read()
                processes += [int(name)] if any(os.fsencode(folder) in line for folder in folders) else []
    return processes


if __name__ == "__main__":
    main()
