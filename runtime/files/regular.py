"""Opens files whose paths come from users or from other files: only regular ones, so that no read waits for a pipe or never ends.

Opening a FIFO waits for a writer; `/dev/zero` never ends; a file of /proc has no size and may wait, too. So the type of a file is checked
before and after it is opened, without waiting, and the file is read up to its size. A link to a regular file is accepted.
`tests/artifact/test_opened_files.py` finds every file of the product that is opened by other means than this module or `writers.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path

from ..errors import reason_of

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
    """A path leads to something other than a regular file, or to a file above a size limit: `strerror` says which."""


def kind_of(path: str | Path, mode: int) -> str:
    """Returns the kind of a file with this mode, with its article: `a pipe (FIFO)`, `a link to /data/y.npz`."""
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}"
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")


def fault(path: str | Path) -> str:
    """Returns the reason why a path cannot be read as a regular file; empty if it can."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return reason_of(error)
    except ValueError as error:  # a name with a zero byte
        return str(error)
    return ""


def open_regular(path: str | Path) -> BufferedReader:
    """Opens a file for reading; NotRegularError, without waiting, where it is a pipe, a device, a socket or a folder."""
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
    """Whether a file, after its links are resolved, is outside of a folder; True for a link that leads back to itself."""
    try:
        return not Path(path).resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError):  # pathlib raises either, by version
        return True


def unlisted(folder: Path, known: Collection[str]) -> Iterator[str]:
    """Yields in order the files of a folder and its subfolders, as paths relative to it, that are not in `known`."""
    for root, folders, files in os.walk(folder):
        folders.sort()
        names = ((Path(root) / file).relative_to(folder).as_posix() for file in sorted(files))
        yield from (name for name in names if name not in known)


def read_regular(path: str | Path, most: int | None = None) -> bytes:
    """Reads a file; NotRegularError where it is not a regular one or has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise NotRegularError(errno.EFBIG, f"has {size:,} bytes; at most {most:,} are read", str(path))
        return file.read(size)


def text_of_system(path: str | Path) -> str:
    """Reads the first MiB of a file that the kernel generates, as in /proc and /sys, which has no size; empty where there is no such file.

    Only for paths that are constants in partc's code, never for those from a user or a file.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_SYSTEM_BYTES).decode(errors="replace")
    except OSError:
        return ""
