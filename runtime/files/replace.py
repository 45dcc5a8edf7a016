"""Puts a new file in the place of an old one, whole or not at all: the one way in which partc writes what outlives it.

    with replacing(Path("y.npz")) as out:
        out.write(...)

A new file is made beside the old one, under a hidden name of its own, and takes its place by one rename. Until then the
old one stays as it is, whatever happens: an error, a full disk, a kill. No link is followed: neither at the hidden name, which is
made exclusively, nor at the name itself, which must be free or that of a regular file.

Whoever writes holds a lock on what is hidden, and a lock ends with its process. So the next writer knows what dead ones left
behind, and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import PartcError, UsageError
from .regular import kind_of
from .removal import FOLDER, identity, remove_file, remove_hidden, remove_tree, take_place

try:
    import fcntl
except ImportError:  # a system without such locks: what dead writers leave behind stays
    fcntl = None  # type: ignore[assignment]

_BESIDE = re.compile(r"\.(.+)\.partc-[0-9a-f]{16}(\.old)?", re.DOTALL)
OLD = ".old"
"""Ends the hidden name of what was whole and is giving way."""
_RANDOM_BYTES = 8
_NAME_BYTES = 200
_TRIES = 16
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK
_FULL = (errno.ENOSPC, errno.EDQUOT)


class WriteError(PartcError):
    """Something could not be written; what was in its place is as it was."""


@contextmanager
def replacing(path: Path, settle: bool = True) -> Iterator[BinaryIO]:
    """A stream into a new file that takes the place of `path` when the block has ended, and is removed where it raises.

    The folder is made where there is none. With `settle` the disk has the contents before the rename, so that a loss of power leaves
    one of the two whole as well. UsageError where something else than a regular file is in the place, a link too; WriteError where
    the disk is full or the folder cannot be written.
    """
    refuse_other(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path, remove_hidden)
        hidden, handle = make_beside(path, lambda name: os.open(name, _CREATE, 0o666))
        made = identity(handle)
        try:
            with open(handle, "w+b") as out:
                yield out
                out.flush()
                if settle:
                    os.fsync(handle)
                take_place(hidden, path, made)  # while the file is open, and so locked
        except BaseException:
            with contextlib.suppress(OSError):
                remove_file(hidden, made)
            raise


@contextmanager
def replacing_together(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, whose files take their places beside `path` when the block has ended, that of its own name last.

    For what writes by names, or several files that belong together: the old file of the name goes before any other is replaced, so
    that at no time one of them is beside another's. Errors are those of `replacing`.
    """
    refuse_other(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path, remove_hidden)
        hidden, handle = make_beside(path, new_folder)
        try:
            yield hidden
            others = sorted(one.name for one in hidden.iterdir() if one.name != path.name)
            for name in others:
                refuse_other(path.with_name(name))
            for name in (*others, path.name):
                with (hidden / name).open("r+b") as made:
                    os.fsync(made.fileno())
            if others:
                remove_file(path)
            for name in (*others, path.name):
                take_place(hidden / name, path.with_name(name))
        finally:
            with contextlib.suppress(OSError):
                remove_tree(hidden, identity(handle))
            os.close(handle)


def write_text(path: Path, text: str, settle: bool = True) -> None:
    """Puts a text, as UTF-8, in the place of a file."""
    with replacing(path, settle) as out:
        out.write(text.encode())


def refuse_other(path: Path) -> None:
    """Raises UsageError where a link, a folder, a device or the like is in the place of a file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # there is none; or its folder cannot be looked into, which is told when it is written
    if not stat.S_ISREG(mode):
        fact = f"{path}: is {kind_of(path, mode)}, and is not replaced"
        raise UsageError(f"{fact}\n  help: give the name of a file, or remove it")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Tells what the operating system refuses of `path` within as one WriteError; what it refuses of other files stays."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not (error.filename is None or _concerns(os.fsdecode(error.filename), path)):
            raise
        fact = error.strerror or str(error)
        before = "; what was there is unchanged" if os.path.lexists(path) else ""
        help = "make room on the disk" if error.errno in _FULL else "give a place that you may write to"
        raise WriteError(f"{path}: cannot be written: {fact}{before}\n  help: {help}") from error


def _concerns(name: str, path: Path) -> bool:
    """Whether a name is that of `path`, of a folder around it, or of something hidden beside it or therein."""
    place, whole = Path(os.path.abspath(name)), Path(os.path.abspath(path))
    hidden = (one for one in (place, *place.parents) if _BESIDE.fullmatch(one.name))
    return place in (whole, *whole.parents) or any(one.parent == whole.parent for one in hidden)


def make_beside(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Makes something under a new hidden name beside `path`, and locks it: its name and the handle that has the lock.

    `make` gives the handle; FileExistsError where the name is taken.
    """
    for _ in range(_TRIES):
        hidden = new_beside(path)
        try:
            handle = make(hidden)
        except FileExistsError:
            continue
        if hold(handle) and os.fstat(handle).st_nlink:
            return hidden, handle
        os.close(handle)  # another writer took it for left behind, between the making and the lock
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def new_folder(path: Path) -> int:
    """Makes a folder, and opens it: the handle."""
    os.mkdir(path)
    return os.open(path, FOLDER)


def new_beside(path: Path, end: str = "") -> Path:
    """A hidden name beside `path` that nothing has yet."""
    return path.with_name(f".{_short(path)}.partc-{secrets.token_hex(_RANDOM_BYTES)}{end}")


def left_beside(path: Path) -> list[Path]:
    """What writers of `path` have made beside it, alive or dead."""
    try:
        entries = sorted(os.listdir(path.parent))
    except OSError:
        return []
    return [
        path.with_name(entry) for entry in entries if (name := _BESIDE.fullmatch(entry)) and name[1] == _short(path)
    ]


def remove_left(path: Path, remove: Callable[[Path], None]) -> None:
    """Removes what dead writers of `path` left behind; what cannot be removed stays."""
    for hidden in left_beside(path):
        if is_left(hidden):
            with contextlib.suppress(OSError):
                remove(hidden)


def _short(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:_NAME_BYTES])


def hold(handle: int) -> bool:
    """Takes the lock of something open; False where another process has it. Where there are no locks, all have it."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_left(hidden: Path) -> bool:
    """Whether its writer is dead. Without locks it counts as alive."""
    if fcntl is None:
        return False
    try:
        handle = os.open(hidden, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
