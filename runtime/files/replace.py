"""Replaces, renames and removes files. All code does so by this module, so that no file is lost that partc did not write.

    with replacing(Path("y.npz")) as out:
        out.write(...)

A new file is written next to the old one under a hidden name, and takes its place by one rename. Until then the old one is unchanged,
whatever happens: an error, a full disk, a kill. Only files and folders themselves are removed or renamed: a link stays, and so does its
target. The folders above are the user's own, and may be links.

A writer locks its hidden file, and the lock ends with its process: so the next writer can remove the files of dead writers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import BinaryIO

from ..errors import PartcError, UsageError, reason_of
from .regular import kind_of
from .writers import NO_LINK, new_file

try:
    import fcntl
except ImportError:  # a system without such locks: what dead writers leave stays
    fcntl = None  # type: ignore[assignment]

OLD = ".old"
"""The end of the hidden name of a complete file or folder that is being replaced."""
_HIDDEN = re.compile(r"\.(.+)\.partc-[0-9a-f]{16}(\.old)?", re.DOTALL)
_RANDOM_BYTES = 8
_NAME_BYTES = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HERE, _EXCHANGE = -100, 2
"""The numbers of `AT_FDCWD` and `RENAME_EXCHANGE` on Linux."""


class WriteError(PartcError):
    """A file could not be written; an old file at its path is unchanged."""


@contextmanager
def replacing(path: Path, settle: bool = True) -> Iterator[BinaryIO]:
    """Yields a stream into a new file that replaces `path` when the block ends, and is removed if the block raises.

    Missing folders are created. With `settle` the contents are flushed to disk before the rename, so that even a loss of power leaves
    either the old or the new file complete. UsageError where `path` is something other than a regular file, such as a link; WriteError
    where the disk is full or the folder cannot be written.
    """
    with _hidden(path) as hidden, _new_locked(hidden) as out:
        yield out
        out.flush()
        if settle:
            os.fsync(out.fileno())
        take_place(hidden, path)  # while the file is open, and so locked


@contextmanager
def replacing_together(path: Path) -> Iterator[Path]:
    """Yields a new folder next to `path`; when the block ends, its files are moved next to `path`, the file with `path`'s own name last.

    For writers that need file names, or for several files that belong together: the old `path` is removed before any other file is
    replaced, so that it is never next to files of the other version. Errors are those of `replacing`.
    """
    with _hidden(path) as hidden, locked_folder(hidden):
        yield hidden
        others = sorted(file.name for file in hidden.iterdir() if file.name != path.name)
        for name in others:
            refuse_other(path.with_name(name))
        for name in (*others, path.name):
            with (hidden / name).open("r+b") as file:
                os.fsync(file.fileno())
        if others:
            remove_file(path)
        for name in (*others, path.name):
            take_place(hidden / name, path.with_name(name))


@contextmanager
def _hidden(path: Path) -> Iterator[Path]:
    """Yields a hidden name for a new file or folder, which is removed after the block unless it was renamed."""
    refuse_other(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)
        hidden = hidden_name(path)
        try:
            yield hidden
        finally:
            with contextlib.suppress(OSError):
                remove(hidden)


def write_text(path: Path, text: str, settle: bool = True) -> None:
    """Replaces a file by one that contains `text` in UTF-8."""
    with replacing(path, settle) as out:
        out.write(text.encode())


def refuse_other(path: Path) -> None:
    """Raises UsageError where a path that is to become a file is a link, a folder, a device or the like."""
    with contextlib.suppress(OSError):  # a folder that cannot be looked into is reported when the file is written
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise UsageError(f"{path}: {_refusal(path)}\n  help: give the name of a file, or remove it")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Converts an OSError in the block that concerns `path` to a WriteError; errors of other files pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not (error.filename is None or _concerns(os.fsdecode(error.filename), path)):
            raise
        fact = reason_of(error)
        before = "; what was there is unchanged" if os.path.lexists(path) else ""
        help = "make room on the disk" if error.errno in _FULL else "give a place that you may write to"
        raise WriteError(f"{path}: cannot be written: {fact}{before}\n  help: {help}") from error


def _concerns(name: str, path: Path) -> bool:
    """Whether a name is that of `path`, of a folder above it, or of a hidden file next to it or inside of that."""
    place, whole = Path(os.path.abspath(name)), Path(os.path.abspath(path))
    hidden = (part for part in (place, *place.parents) if _HIDDEN.fullmatch(part.name))
    return place in (whole, *whole.parents) or any(part.parent == whole.parent for part in hidden)


def hidden_name(path: Path, end: str = "") -> Path:
    """Returns a new hidden name next to `path`."""
    return path.with_name(f".{_short(path)}.partc-{secrets.token_hex(_RANDOM_BYTES)}{end}")


def _short(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:_NAME_BYTES])


def hidden_files(path: Path) -> list[Path]:
    """Returns the hidden files of writers of `path`, whether these are alive or dead."""
    try:
        entries = sorted(os.listdir(path.parent))
    except OSError:
        return []
    return [
        path.with_name(entry) for entry in entries if (name := _HIDDEN.fullmatch(entry)) and name[1] == _short(path)
    ]


def _lock(handle: int) -> bool:
    """Locks a new file or folder, on systems that have locks; returns whether it still has its name.

    Until it is locked, another writer may take it for a dead one's and remove it; that writer has the lock meanwhile.
    """
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fstat(handle).st_nlink > 0


def _new_locked(path: Path) -> BufferedRandom:
    """Creates a file and opens it, locked until it is closed."""
    out = new_file(path)
    if _lock(out.fileno()):
        return out
    out.close()
    return _new_locked(path)


def _new_locked_folder(path: Path) -> int:
    """Creates a folder and locks it; returns the handle that holds the lock."""
    os.mkdir(path)
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        if _lock(handle):
            return handle
        os.close(handle)
    return _new_locked_folder(path)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Creates a folder and locks it during the block."""
    handle = _new_locked_folder(path)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def abandoned(hidden: Path) -> Iterator[bool]:
    """Yields whether the writer of a hidden file is dead; the file is then locked during the block. False on systems without locks."""
    handle, dead = None, False
    with contextlib.suppress(OSError):
        if fcntl is not None:
            handle = os.open(hidden, os.O_RDONLY | os.O_NONBLOCK | NO_LINK)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dead = True
    try:
        yield dead
    finally:
        if handle is not None:
            os.close(handle)


def make_folder(path: Path, exist_ok: bool = False) -> None:
    """Creates a folder and those above it. FileExistsError says what has the name; with `exist_ok` a folder may, but not a link to one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not (exist_ok and _is_folder(path)):
            raise FileExistsError(errno.EEXIST, f"{_refusal(path)}; move it away", str(path)) from None


def take_place(hidden: Path, place: Path) -> None:
    """Renames a hidden file of partc's to `place`, where a regular file or nothing may be; FileExistsError where something else is."""
    if os.path.lexists(place) and not _is_file(place):
        raise FileExistsError(errno.EEXIST, _refusal(place), str(place))
    os.replace(hidden, place)


def move_folder(old: Path, new: Path) -> None:
    """Renames a folder to `new`, which must not exist or be an empty folder; NotADirectoryError where `old` is a link or no folder."""
    if not _is_folder(old):
        raise NotADirectoryError(errno.ENOTDIR, f"{_refusal(old)}: it is not the folder that was made", str(old))
    os.replace(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    names = (_HERE, os.fsencode(one), _HERE, os.fsencode(other))
    return rename is not None and rename(*names, _EXCHANGE) == 0


def remove_file(path: Path) -> bool:
    """Removes a regular file; returns whether it did. A link or a folder stays; a file that is already gone is not an error."""
    with contextlib.suppress(FileNotFoundError):
        if _is_file(path):
            os.unlink(path)
            return True
    return False


def remove(path: Path) -> None:
    """Removes a file, or a folder with its contents, that partc created under a hidden name; the targets of links stay."""
    if not remove_file(path) and _is_folder(path):
        shutil.rmtree(path)


def remove_abandoned(path: Path, remove: Callable[[Path], None] = remove) -> None:
    """Removes the hidden files of dead writers of `path`; those that cannot be removed stay."""
    for hidden in hidden_files(path):
        with abandoned(hidden) as dead, contextlib.suppress(OSError):
            if dead:
                remove(hidden)


def remove_inside(folder: Path, listed: Callable[[str], object], last: str = "") -> None:
    """Removes the files of a folder for which `listed` holds, the file `last` after all others, and then the empty folders.

    `listed` gets a path relative to the folder. All other files stay, with the folders above them. If the folder is a link, nothing is
    removed.
    """
    if not _is_folder(folder):
        return
    for root, folders, files in os.walk(folder, topdown=False):
        inside = Path(root).relative_to(folder)
        for name in files:
            if (path := (inside / name).as_posix()) != last and listed(path):
                remove_file(Path(root) / name)
        for name in folders:
            with contextlib.suppress(OSError):  # not empty, or a link
                os.rmdir(Path(root) / name)
    with contextlib.suppress(OSError):  # not empty, or removed by another rank
        if os.listdir(folder) == [last] and listed(last):
            remove_file(folder / last)
        os.rmdir(folder)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _refusal(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f"is {kind_of(path, os.lstat(path).st_mode)}, and is not replaced"
    return "is gone"
