"""Opens the files that users and files name: regular files alone, so that no pipe is waited for and no endless file is read.

Who opens a FIFO waits until someone writes; `/dev/zero` never ends; a file of /proc has no size and may wait, too. So a file is
looked at before and after it is opened, without waiting, and is read up to the size that it has. A link to a regular file is one.

`tests/artifact/test_opened_files.py` finds every file of the product that is opened in another way than by this module or by
`writers.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path

_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_SYSTEM_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a file"),
)


class NotRegularError(OSError):
    """A path names something that is not a regular file, or a file above a limit: `strerror` says what it is."""


def kind_of(path: str | Path, mode: int) -> str:
    """What a file of this mode is, with its article: `a pipe (FIFO)`, `a link to /data/y.npz`."""
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}"
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")


def fault(path: str | Path) -> str:
    """Why this is not a regular file that may be read; empty if it is."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a name with a zero byte
        return str(error)
    return ""


def open_regular(path: str | Path) -> BufferedReader:
    """The file, open for reading; NotRegularError, at once, where it is a pipe, a device, a socket or a folder."""
    _refuse_other(path, os.stat(path).st_mode)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _OPEN))  # noqa: SIM115, it is handed on
    try:
        _refuse_other(path, os.fstat(file.fileno()).st_mode)
    except NotRegularError:
        file.close()
        raise
    return file


def _refuse_other(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path, mode)}, and no regular file", str(path))


def is_outside(path: str | Path, folder: str | Path) -> bool:
    """Whether a file, links followed, is not inside of a folder; a link that leads around to itself is nowhere."""
    try:
        return not Path(path).resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError):  # pathlib raises either, by version
        return True


def unlisted(folder: Path, known: Collection[str]) -> Iterator[str]:
    """The files of a folder and of those within, by their paths in it, that are not known; in order."""
    for root, folders, files in os.walk(folder):
        folders.sort()
        names = ((Path(root) / file).relative_to(folder).as_posix() for file in sorted(files))
        yield from (name for name in names if name not in known)


def read_regular(path: str | Path, most: int | None = None) -> bytes:
    """The bytes of a file; NotRegularError where it is not a regular one, or has more than `most`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise NotRegularError(errno.EFBIG, f"has {size:,} bytes; at most {most:,} are read", str(path))
        return file.read(size)


def text_of_system(path: str | Path) -> str:
    """The text of a file that the kernel makes, as in /proc and /sys, which has no size: its first MiB; empty where there is no such file.

    For names that partc itself writes in its code, never for those that a user or a file gives.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_SYSTEM_BYTES).decode(errors="replace")
    except OSError:
        return ""
