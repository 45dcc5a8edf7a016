"""The list of checkpoints that this run has written into a folder, and their removal; nothing else is removed.

`.written.json` lists the checkpoints of the run by the names of their folders, each with the hash of its index, and of the one that it
replaces. It is written before a checkpoint gets its name, so that no checkpoint of a run is missing in it. `keep` counts and removes what
is listed, has a listed index, and holds only plain files that a save puts there; so neither another run's checkpoints, nor one that was
replaced or that a user has put something into, nor what a link leads to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..errors import CheckpointError
from ..files.counted import CHECKPOINT_LIST, read_json
from ..files.regular import read_regular
from ..files.replace import move_folder, remove_inside, write_text
from .index import INDEX, NONFINITE, OLD, REMOVED, hidden_folder, is_step_name, read_index, stale_files, step_folder

WRITTEN = ".written.json"
_OURS = re.compile(r"rank_\d{4,}\.safetensors|" + re.escape(INDEX))
_OF_SAVES = re.compile(_OURS.pattern + r"|rank_\d{4,}\.written")
"""What a save that is under way has in its hidden folder."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


Listed: TypeAlias = Mapping[str, Sequence[str]]
"""Maps the name of a checkpoint's folder to the hashes of the indexes that the run has given it."""


def listed_checkpoints(folder: Path) -> Listed:
    """What the run has written into a folder; nothing where no list is sound."""
    try:
        listed = read_json(folder / WRITTEN, CHECKPOINT_LIST)
    except (OSError, ValueError):
        return {}
    if not isinstance(listed, dict):
        return {}
    return {
        name: [digest for digest in digests if isinstance(digest, str) and _DIGEST.fullmatch(digest)]
        for name, digests in listed.items()
        if is_step_name(name) and isinstance(digests, list)
    }


def add(folder: Path, listed: Listed, name: str, index: str) -> Listed:
    """Lists one more checkpoint, before it gets its name; those that are not there any more are left out."""
    there = {one: digests for one, digests in listed.items() if (folder / one).is_dir()}
    before = [digest for digest in there.get(name, ()) if digest == _digest(folder / name)]
    there[name] = [*before, hashlib.sha256(index.encode()).hexdigest()]
    write_text(folder / WRITTEN, json.dumps(dict(sorted(there.items())), indent=1) + "\n")
    return there


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay when it writes another one: the `keep` newest, all where it is None, and that of the step `best`.

    `goes_on`: whether the run is the one that wrote there before, whose checkpoints are then its own.
    """

    keep: int | None = None
    best: int | None = None
    goes_on: bool = True


KEEP_ALL = Retention()


def prune(folder: Path, target: Path, listed: Listed, retention: Retention) -> None:
    """Removes the oldest of a run beyond those to be kept; the new one stays, also where later steps were there before, and the best one.

    Those that hold numbers which are not finite go first, and such a new one takes the place of no other kind. One that cannot be removed
    stays: the new checkpoint is whole all the same.
    """
    if retention.keep is None:
        return
    best = "" if retention.best is None else step_folder(retention.best)
    others = sorted(
        (
            path
            for name in listed
            if name not in (target.name, best)
            # left alone where it is not as the run has left it
            if os.path.lexists(path := folder / name) and not foreign_entries(path) and _digest(path) in listed[name]
        ),
        key=lambda path: int(path.name.rpartition("_")[2]),
    )
    excess = max(0, len(others) + 1 - max(1, retention.keep))
    wrong = [path for path in others if _is_wrong(path)]
    sound = [] if _is_wrong(target) else [path for path in others if path not in wrong]
    for path in [*wrong, *sound][:excess]:
        gone = folder / hidden_folder(path.name, REMOVED)
        with contextlib.suppress(OSError):
            move_folder(path, gone)
            discard(gone)


def _is_wrong(path: Path) -> bool:
    try:
        return bool(read_index(path).meta.get(NONFINITE))
    except CheckpointError:
        return False


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path / INDEX)).hexdigest()
    except OSError:
        return ""


def foreign_entries(path: Path) -> list[str]:
    """The entries of a checkpoint's folder that no save writes; `["."]` where the path is a link or not a folder."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        return ["."]
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not (_OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))
        )


def discard(path: Path) -> None:
    """Removes a hidden folder with the files that a save puts there; what else is in it stays, and the folder with it."""
    with contextlib.suppress(OSError):
        remove_inside(path, _OF_SAVES.fullmatch)


def clear(folder: Path) -> None:
    """Removes what saves that did not end have left; a checkpoint that gave way to none comes back."""
    for path, name, doing in stale_files(folder):
        if doing == OLD and not os.path.lexists(folder / name) and not path.is_symlink():
            move_folder(path, folder / name)
        else:
            discard(path)
