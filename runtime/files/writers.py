"""Opens files for writing: a new file must not exist, an existing one must be regular, and no link is followed.

    with new_file(folder / "rank_0000.onnx") as out:    # FileExistsError where the name exists, even as a dangling link
        out.write(data)

A file that replaces another one is written by `replace.py`, which begins with a new file.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import TextIO

from ..errors import UsageError
from .regular import NotRegularError, kind_of

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0)
_CHANGE = os.O_RDWR | NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_RIGHTS = 0o666
"""The permissions of a new file, less the user's umask."""


def new_file(path: Path) -> BufferedRandom:
    """Creates a file and opens it for writing and reading; FileExistsError where its name exists, even as a link."""
    return open(path, "w+b", opener=lambda name, _: os.open(name, CREATE, _RIGHTS))


def new_raw_file(path: Path) -> FileIO:
    """Creates a file like `new_file`, and opens it without a buffer."""
    return open(path, "w+b", buffering=0, opener=lambda name, _: os.open(name, CREATE, _RIGHTS))


def write_new(path: Path, data: bytes) -> None:
    """Creates a file with `data`; FileExistsError as for `new_file`."""
    with new_file(path) as out:
        out.write(data)


def link_file(old: Path, new: Path) -> bool:
    """Gives a regular file of this process's user a hard link; False where it is another kind of file, or the file system has no links."""
    try:
        status = os.lstat(old)
        if not stat.S_ISREG(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
            return False
        os.link(old, new, follow_symlinks=False)
    except (OSError, NotImplementedError):
        return False
    return True


def open_to_change(path: str | Path) -> BufferedRandom:
    """Opens an existing regular file for reading and writing; OSError where it is a link or not a regular file."""
    file = open(path, "r+b", opener=lambda name, _: os.open(name, _CHANGE))  # noqa: SIM115, it is handed on
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path, mode)}, and no regular file", str(path))
    return file


def open_to_append(path: str | Path) -> TextIO:
    """Opens a text file for appending, and creates a missing one; UsageError where the path is a link.

    A pipe with a reader is accepted; one without a reader is an OSError, without waiting.
    """
    try:
        return open(path, "a", encoding="utf-8", opener=_without_waiting)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK) or not os.path.islink(path):
            raise
        fact = f"{path}: is {kind_of(path, os.lstat(path).st_mode)}, and links are not followed when writing"
        raise UsageError(f"{fact}\n  help: give the name of the file itself, or remove the link") from None


def _without_waiting(path: str, flags: int) -> int:
    handle = os.open(path, flags | NO_LINK | getattr(os, "O_NONBLOCK", 0), _RIGHTS)
    if hasattr(os, "set_blocking"):
        os.set_blocking(handle, True)
    return handle
