"""Processes of a job: makes one end with its parent, and finds those that have the job's folder in their command line."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from partc.runtime.files.regular import text_of_system

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Asks the kernel to send the signal to this process when its parent ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def naming(folder: Path) -> Iterator[int]:
    """Yields the other processes of this machine with the folder in their command line; none without /proc."""
    word = os.fsencode(folder)
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(entry.parent.name)
            if pid != os.getpid() and word in os.fsencode(text_of_system(entry)):
                yield pid


def kill(processes: Iterator[int]) -> None:
    """Kills the processes that still exist."""
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
