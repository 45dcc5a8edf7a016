"""Writes a new artifact in the place of an old one, atomically, and never touches files that partc did not write.

    with replacing_folder(Path("build")) as folder:
        ...                                     # the files, manifest.json last

The place may be free, an empty folder, or an artifact whose manifest lists all files in it. The new folder is made next to the old one,
and the two are exchanged in one step of the file system (Linux's RENAME_EXCHANGE; where the file system lacks it, by two renames). Then
the old folder is removed: the files that its own manifest lists, and no others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..files import counted
from ..files.regular import kind_of
from ..files.replace import (
    OLD,
    WriteError,
    abandoned,
    exchange,
    hidden_files,
    hidden_name,
    locked_folder,
    move_folder,
    remove,
    remove_abandoned,
    remove_inside,
    write_errors,
)
from .format import MANIFEST, stays_inside

_NAMED = 8


@dataclass(frozen=True)
class Obstacle:
    """Why a folder is not replaced, and what can be done."""

    fact: str
    help: str


class ObstacleError(UsageError):
    """Something is in the way of a new artifact."""

    def __init__(self, out: Path, found: Obstacle) -> None:
        super().__init__(f"{out}: {found.fact}\n  help: {found.help}")
        self.found = found


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Opens a new folder that becomes `out` when the block ends, and is removed if the block raises.

    ObstacleError where `out` may not be replaced, WriteError where it cannot be written; `out` is then unchanged. WriteError also where
    other files came into the old folder meanwhile; `out` is then written.
    """
    refuse_obstacle(out)
    place = Path(os.path.abspath(out))
    with write_errors(out):
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in hidden_files(place):  # where a writer died between two renames
            if left.name.endswith(OLD) and not os.path.lexists(place):
                with abandoned(left) as dead:
                    if dead:
                        move_folder(left, place)
        remove_abandoned(place, remove_artifact)
        hidden = old = hidden_name(place)
        try:
            with locked_folder(hidden):
                yield hidden
                refuse_obstacle(out)  # again, because the compile may have taken long
                if not exchange(hidden, place):
                    old = _swap(hidden, place)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_artifact(hidden)  # which may be the old one already
            raise
        _remove_old(old, out)


def obstacle(out: Path) -> Obstacle | None:
    """Returns the reason why no new artifact can be written at a path; None where it can."""
    try:
        mode = os.lstat(out).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return Obstacle(f"is {kind_of(out, mode)}, and links are not replaced", f"give -o {out.resolve()} itself")
    if not stat.S_ISDIR(mode):
        return Obstacle(f"is {kind_of(out, mode)}, and is not replaced", "choose another folder with -o, or remove it")
    if os.path.ismount(out) or os.path.samefile(out, os.curdir):
        what = "a mounted file system" if os.path.ismount(out) else "the current folder"
        return Obstacle(f"is {what}, which no new folder can replace", "give the name of a folder in it with -o")
    listed = listed_files(out)
    found = _strangers(out, listed or frozenset())
    if not found:
        return None
    named = ", ".join(found[:_NAMED]) + (f", and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
    if listed is None:
        fact = f"exists and is not an artifact of partc, so it is not replaced; it has {named}"
        return Obstacle(fact, "choose another folder with -o, or remove it")
    fact = f"is not replaced: it has what partc did not write there, {named}"
    return Obstacle(fact, "move that out of the folder, or choose another one with -o")


def refuse_obstacle(out: Path) -> None:
    """Raises ObstacleError where something is in the way of a new artifact."""
    if (found := obstacle(out)) is not None:
        raise ObstacleError(out, found)


def listed_files(folder: Path) -> frozenset[str] | None:
    """Returns the files that the manifest lists, of whatever version it is, and the manifest; None where the folder is not an artifact."""
    try:
        data = counted.read_json(folder / MANIFEST, counted.MANIFEST)
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or not {"format", "partc", "ranks", "files"} <= data.keys():
        return None
    files = data["files"]
    if not isinstance(files, dict) or not all(isinstance(one, dict) and "sha256" in one for one in files.values()):
        return None
    return frozenset(name for name in files if stays_inside(name)) | {MANIFEST}


def _strangers(folder: Path, listed: frozenset[str]) -> list[str]:
    """Returns the entries of a folder that are not in `listed`; a subfolder without listed files is one entry. Links are not files."""
    around = {parent.as_posix() for name in listed for parent in Path(name).parents}
    strangers = []
    for root, folders, files in os.walk(folder):
        inside = Path(root).relative_to(folder)
        for name in sorted(folders):
            entry = (inside / name).as_posix()
            if entry not in around or (Path(root) / name).is_symlink():
                strangers.append(f"'{entry}/'")
                folders.remove(name)
        for name in files:
            entry = (inside / name).as_posix()
            if entry not in listed or not stat.S_ISREG(os.lstat(Path(root) / name).st_mode):
                strangers.append(f"'{entry}'")
    return sorted(strangers)


def remove_artifact(folder: Path) -> None:
    """Removes a folder that partc wrote: the files that its manifest lists, the manifest last; the whole folder if its writer died before
    it wrote a manifest. Other files that came into an artifact stay, and so do the folders around them.
    """
    listed = listed_files(folder)
    if listed is None:
        remove(folder)
    else:
        remove_inside(folder, listed.__contains__, MANIFEST)


def _remove_old(old: Path, out: Path) -> None:
    """Removes the old folder; where that fails, the next writer removes it. WriteError where it has files that partc did not write."""
    with contextlib.suppress(OSError):
        strangers = _strangers(old, listed_files(old) or frozenset())
        remove_artifact(old)
        if strangers:
            raise WriteError(f"{out}: is written; what came into the old folder meanwhile lies in {old}")


def _swap(hidden: Path, place: Path) -> Path:
    """Replaces a folder by two renames, where it does not exist or the file system has no exchange; returns the old folder's new name."""
    old = hidden_name(place, OLD)
    if os.path.lexists(place):
        try:
            move_folder(place, old)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            remove_artifact(place)  # of a lower layer of an overlay, where folders cannot be renamed
    try:
        move_folder(hidden, place)
    except OSError:
        if old.exists():
            move_folder(old, place)
        raise
    return old
