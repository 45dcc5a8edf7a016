"""The one place where partc removes, renames or exchanges files: what it made itself, found through handles of folders, and no link.

    made = identity(handle)                      # of what was made
    remove_file(hidden, made)                    # nothing happens where something else has the name by now
    remove_inside(scratch, is_ours, made)        # the files of a folder that are ours, and the folder where nothing else is in it

A name may have become another thing since it was looked at: a link, or a file that somebody else has put there. So a folder is opened,
which fails for a link; what is in it is looked at by `lstat` through that handle, and removed through it. What is a link, or is not the
thing that was made, stays. The folders around are the user's own, and may be links.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from .regular import kind_of

Identity: TypeAlias = tuple[int, int]
"""Identifies a file or folder, whatever its name: the device and the inode."""

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_LINK
"""Opens a folder, and no link to one."""
_AROUND = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_HERE = -100
_EXCHANGE = 2
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def identity(about: os.stat_result | int) -> Identity:
    """The identity of what was looked at, or is open."""
    found = os.fstat(about) if isinstance(about, int) else about
    return found.st_dev, found.st_ino


def make_folder(path: Path) -> Identity:
    """Makes a folder, which nothing had the name of; FileExistsError says what has."""
    try:
        os.mkdir(path)
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, f"is {_what(path)}, and is not replaced; move it away", str(path)) from None
    return identity(os.lstat(path))


def own_folder(path: Path) -> Identity:
    """The identity of a folder, which is made where there is none; NotADirectoryError where a link or something else has the name."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(path)
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"is {_what(path)}, and is not replaced; move it away", str(path))
    return identity(about)


def remove_file(path: Path, made: Identity | None = None) -> bool:
    """Removes a regular file, of this identity where one is given; whether it did. A link or a folder stays."""
    with contextlib.suppress(FileNotFoundError), _around(path) as at:
        return _remove(at, path.name, made)
    return False


def remove_inside(folder: Path, wanted: Callable[[str], object], made: Identity | None = None) -> None:
    """Removes the regular files of a folder whose names are wanted, and the folder where nothing else is in it.

    Nothing where a link or something else has the folder's name, or another folder than the one of this identity.
    """
    with _around(folder) as at, _opened(at, folder.name) as handle:
        if handle is None or (made is not None and identity(handle) != made):
            return
        for name in os.listdir(handle):
            if wanted(name):
                _remove(handle, name)
        if not os.listdir(handle):
            with contextlib.suppress(FileNotFoundError):
                if identity(os.lstat(folder.name, dir_fd=at)) == identity(handle):
                    os.rmdir(folder.name, dir_fd=at)


def remove_tree(folder: Path, made: Identity | None = None) -> None:
    """Removes a folder that partc made for itself with all that is in it, links there as links; nothing where a link has its name."""
    with contextlib.suppress(FileNotFoundError), _around(folder) as at:
        about = os.lstat(folder.name, dir_fd=at)
        if stat.S_ISDIR(about.st_mode) and made in (None, identity(about)):
            shutil.rmtree(folder.name, dir_fd=at)


def remove_hidden(hidden: Path, made: Identity | None = None) -> None:
    """Removes a file, or a folder with all that is in it, which partc made under a hidden name."""
    if not remove_file(hidden, made):
        remove_tree(hidden, made)


def remove_listed(folder: Path, listed: Callable[[str], bool], last: str) -> None:
    """Removes the files of a folder, and of those within, that are listed, and the folders that are empty then; the file `last` comes last.

    `listed` gets a path within the folder. What else is there stays, and the folders around it.
    """
    for root, folders, files, handle in os.fwalk(folder, topdown=False):
        inside = Path(root).relative_to(folder)
        for name in files:
            if (one := (inside / name).as_posix()) != last and listed(one):
                _remove(handle, name)
        for name in folders:
            with contextlib.suppress(OSError):  # not empty, or a link
                os.rmdir(name, dir_fd=handle)
    remove_inside(folder, lambda name: name == last and os.listdir(folder) == [last])


def move_folder(old: Path, new: Path, made: Identity | None = None) -> None:
    """Gives a folder another name, which nothing or an empty folder has; NotADirectoryError where a link has the old one by now."""
    with _around(old) as at, _around(new) as to:
        about = os.lstat(old.name, dir_fd=at)
        if not stat.S_ISDIR(about.st_mode) or made not in (None, identity(about)):
            raise NotADirectoryError(errno.ENOTDIR, f"is {_what(old)}, and not the folder that was made", str(old))
        os.replace(old.name, new.name, src_dir_fd=at, dst_dir_fd=to)


def take_place(hidden: Path, place: Path, made: Identity | None = None) -> None:
    """Gives a file that partc made its name, in the place of a regular file or of nothing; FileExistsError where something else is."""
    with _around(hidden) as at, _around(place) as to:
        about = os.lstat(hidden.name, dir_fd=at)
        if not stat.S_ISREG(about.st_mode) or made not in (None, identity(about)):
            raise FileNotFoundError(errno.ENOENT, "is not the file that was written", str(hidden))
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(place.name, dir_fd=to).st_mode):
                raise FileExistsError(errno.EEXIST, f"is {_what(place)}, and is not replaced", str(place))
        os.replace(hidden.name, place.name, src_dir_fd=at, dst_dir_fd=to)


def exchange(one: Path, other: Path) -> bool:
    """Lets two folders or files change places in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(other))


@contextmanager
def _around(path: Path) -> Iterator[int]:
    """A handle of the folder in which a name is; links that lead to that folder are the user's, and followed."""
    handle = os.open(path.parent, _AROUND)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _opened(at: int, name: str) -> Iterator[int | None]:
    """A handle of the folder of a name; None where there is none, or a link or something else has the name."""
    try:
        handle = os.open(name, FOLDER, dir_fd=at)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _remove(at: int, name: str, made: Identity | None = None) -> bool:
    """Removes a regular file; False where another process has removed it meanwhile, as ranks that discard one folder together do."""
    with contextlib.suppress(FileNotFoundError):
        about = os.lstat(name, dir_fd=at)
        if stat.S_ISREG(about.st_mode) and made in (None, identity(about)):
            os.unlink(name, dir_fd=at)
            return True
    return False


def _what(path: Path) -> str:
    with contextlib.suppress(OSError):
        return kind_of(path, os.lstat(path).st_mode)
    return "gone"
