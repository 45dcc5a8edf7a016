"""Finds the line of user code at which a fatal signal ended a rank: an abort, or a segmentation fault in a library that the code calls.

On such a signal, faulthandler writes the stacks of all threads into a file in the job's folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
from pathlib import Path
from typing import IO

from partc.runtime.files.regular import read_regular
from partc.runtime.files.writers import new_file
from partc.runtime.user_code import is_of_user

_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')
_files: list[IO[bytes]] = []


def write_faults(folder: Path, rank: int) -> None:
    """Enables faulthandler in this process, which is the rank."""
    with contextlib.suppress(OSError):
        _files.append(new_file(folder / f"fault_{rank}"))
        faulthandler.enable(_files[-1])


def fault_of(folder: Path, rank: int) -> str:
    """Returns the line of the user's code in which a rank was, such as `records.py:12`; empty where there is none."""
    with contextlib.suppress(OSError):
        text = read_regular(folder / f"fault_{rank}").decode(errors="replace")
        calls = text.partition("Current thread")[2].partition("\n\n")[0]
        for file, line in _FRAME.findall(calls):
            if is_of_user(file):
                return f"{file}:{line}"
    return ""
