"""Lists the checkpoints that this run has written into a folder, and removes old ones; it removes nothing else.

`.written.json` maps the folder name of each checkpoint of the run to the hash of its index and, if it replaces one of the run, of that
one's index. It is written before a checkpoint gets its name, so that it contains every checkpoint of the run. `keep` counts and removes
only folders that are listed, have a listed index, and contain only plain files that a save writes. So it never touches another run's
checkpoints, a checkpoint that was replaced or into which a user has put a file, or the target of a link.
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
"""The names of the files that a save in progress has in its hidden folder."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


Listed: TypeAlias = Mapping[str, Sequence[str]]
"""Maps the folder name of a checkpoint to the hashes of the indexes that the run has written there."""


def listed_checkpoints(folder: Path) -> Listed:
    """Returns the run's list of a folder's checkpoints; it is empty where there is no valid list."""
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
    """Adds a checkpoint to the list before it gets its name, drops those whose folders are gone, and returns the new list."""
    there = {one: digests for one, digests in listed.items() if (folder / one).is_dir()}
    before = [digest for digest in there.get(name, ()) if digest == _digest(folder / name)]
    there[name] = [*before, hashlib.sha256(index.encode()).hexdigest()]
    write_text(folder / WRITTEN, json.dumps(dict(sorted(there.items())), indent=1) + "\n")
    return there


@dataclass(frozen=True)
class Retention:
    """The checkpoints of a run that stay when it writes another one: the `keep` newest (None: all), and that of the step `best`.

    `goes_on`: whether the run continues the one that wrote there before, whose checkpoints then count as its own.
    """

    keep: int | None = None
    best: int | None = None
    goes_on: bool = True


KEEP_ALL = Retention()


def prune(folder: Path, target: Path, listed: Listed, retention: Retention) -> None:
    """Removes the oldest checkpoints of a run beyond `retention`.

    The new one, `target`, always stays, even if older ones have later steps; so does the best.

    Checkpoints marked as containing non-finite numbers are removed first, and if the new one is marked, it displaces no unmarked one. A
    checkpoint that cannot be removed stays, without an error: the new checkpoint is complete in any case.
    """
    if retention.keep is None:
        return
    best = "" if retention.best is None else step_folder(retention.best)
    others = sorted(
        (
            path
            for name in listed
            if name not in (target.name, best)
            # a folder that has changed since the run wrote it is not touched
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
    """Removes a hidden folder with the files that a save writes there; if it has other files, these and the folder stay."""
    with contextlib.suppress(OSError):
        remove_inside(path, _OF_SAVES.fullmatch)


def clear(folder: Path) -> None:
    """Removes the hidden folders of interrupted saves.

    A checkpoint that was moved away, and whose replacement is missing, gets its name back.
    """
    for path, name, doing in stale_files(folder):
        if doing == OLD and not os.path.lexists(folder / name) and not path.is_symlink():
            move_folder(path, folder / name)
        else:
            discard(path)
