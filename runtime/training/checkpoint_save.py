"""Writes a checkpoint so that a crash at any moment leaves the last one whole.

Each rank writes what it owns into a hidden folder beside the place where the checkpoint will be, and waits for the disk. When all
have, rank 0 writes the index, and renames the folder: before the rename there is no new checkpoint, after it there is a whole
one. What ranks tell one another is a line of text each: the size and hash of a file, or why there is none. A rank that fails makes
all fail, with what went wrong on each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from partc.runtime.dtypes import Array, dense
from partc.runtime.format import StateRecord
from pydantic import JsonValue

from ..errors import CheckpointError
from .checkpoint_file import Stored, write_tensors
from .checkpoint_index import (
    FORMAT,
    INDEX,
    OLD,
    REMOVED,
    SAVING,
    CheckpointFile,
    CheckpointIndex,
    PieceRecord,
    TensorRecord,
    hidden_folder,
    left_behind,
    rank_tensors,
    read_index,
    step_folder,
    steps,
)
from .checkpoint_owners import Owned, owners
from .finite import NONFINITE

Share: TypeAlias = Callable[[str], Sequence[str]]
"""A collective: takes this rank's text and gives the texts of all ranks, in their order."""
_DONE, _FAILED = "+", "-"


def save(
    folder: Path,
    step: int,
    rank: int,
    pieces: Sequence[tuple[StateRecord, Array]],
    records: Sequence[StateRecord],
    meta: Mapping[str, JsonValue],
    share: Share,
    keep: int | None = None,
) -> Path:
    """Writes the checkpoint of a step into `folder`, which all ranks share, and removes the oldest beyond `keep`; its path.

    Every rank calls it, with its own `pieces` and with the same other arguments. When it returns, on any rank, the checkpoint is
    whole. CheckpointError is raised on all ranks alike; the checkpoints that were there are then as they were.
    """
    target = folder / step_folder(step)
    scratch = folder / hidden_folder(target.name, SAVING)
    owned: dict[str, list[Owned]] = {}

    def begin() -> str:
        owned.update(owners(records))
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _clear(folder)
            scratch.mkdir()
        return ""

    def write() -> str:
        scratch.mkdir(parents=True, exist_ok=True)
        record = _write(scratch / rank_tensors(rank), rank, pieces, owned)
        return "" if record is None else record.model_dump_json(exclude={"sha256"})

    def commit() -> str:
        if rank == 0:
            index = _index(step, records, owned, meta, said)
            _commit(scratch, target, index)
            _prune(folder, target, keep)
        return ""

    try:
        _together(target, share, begin)
        said = _together(target, share, write)
        _together(target, share, commit)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


def _together(target: Path, share: Share, act: Callable[[], str]) -> list[str]:
    """What the act says on each rank; CheckpointError on all ranks where it raises on any."""
    failure: Exception | None = None
    try:
        text = _DONE + act()
    except Exception as error:
        failure = error
        text = _FAILED + (str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}")
    said = share(text)
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(said):
        if not one.startswith(_DONE):
            ranks.setdefault(one.removeprefix(_FAILED), []).append(rank)
    if ranks:
        count = sum(map(len, ranks.values()))
        lines = [f"{target}: was not written: {count} of {len(said)} ranks failed"]
        for reason, some in ranks.items():
            who = f"rank {some[0]}" if len(some) == 1 else f"ranks {', '.join(map(str, some))}"
            lines += [f"  {who}: {line}" for line in reason.splitlines() or ["no reason was given"]]
        raise CheckpointError(
            "\n".join([*lines, "  help: the checkpoints before it are whole; mend this, and go on from the last"])
        ) from failure
    return [one.removeprefix(_DONE) for one in said]


def _write(
    path: Path, rank: int, pieces: Sequence[tuple[StateRecord, Array]], owned: Mapping[str, Sequence[Owned]]
) -> CheckpointFile | None:
    """Writes what a rank owns, and gives the file's record; None where it owns nothing."""
    arrays = {record.value: (record, array) for record, array in pieces}
    mine: dict[str, tuple[Owned, Array]] = {}
    problems = []
    for tensor, some in owned.items():
        for one in some:
            if one.rank != rank:
                continue
            if one.value not in arrays:
                problems.append(f"'{tensor}', which is '{one.value}' here, was not handed over")
                continue
            record, array = arrays[one.value]
            dtype = dense(record.type)
            if dtype is None or array.dtype != dtype.numpy or array.shape != one.held.shape:
                problems.append(
                    f"'{tensor}' was handed over as {array.dtype.name} {list(array.shape)}; the rank's piece is "
                    f"{record.type} {list(one.held.shape)}"
                )
                continue
            mine[_key(tensor, one, record.shape)] = one, array
    if problems:
        raise ValueError("\n".join(problems))
    if not mine:
        return None
    types = {key: dense(arrays[one.value][0].type) for key, (one, _) in mine.items()}
    stored = {key: Stored(dtype, mine[key][0].box.shape) for key, dtype in types.items() if dtype is not None}
    written = write_tensors(path, stored, lambda key: mine[key][1][mine[key][0].box.inside(mine[key][0].held)])
    return CheckpointFile(bytes=written.bytes, header=written.header)


def _key(tensor: str, owned: Owned, shape: Sequence[int]) -> str:
    return tensor if owned.box.shape == tuple(shape) else f"{tensor}{owned.box}"


def _index(
    step: int,
    records: Sequence[StateRecord],
    owned: Mapping[str, Sequence[Owned]],
    meta: Mapping[str, JsonValue],
    said: Sequence[str],
) -> CheckpointIndex:
    tensors: dict[str, TensorRecord] = {}
    for record in records:
        dtype = dense(record.type)
        assert dtype is not None
        if record.tensor in tensors or record.kind == "gradient":
            continue
        tensors[record.tensor] = TensorRecord(
            dtype=dtype.shown,
            shape=tuple(record.shape),
            kind=record.kind,
            parameter=record.parameter,
            pieces=tuple(
                PieceRecord(
                    file=rank_tensors(one.rank),
                    key=_key(record.tensor, one, record.shape),
                    begin=one.box.begin,
                    end=one.box.end,
                )
                for one in owned[record.tensor]
            ),
        )
    files = {rank_tensors(rank): CheckpointFile.model_validate_json(text) for rank, text in enumerate(said) if text}
    return CheckpointIndex(
        format=FORMAT, partc=version("partc"), step=step, ranks=len(said), meta=dict(meta), tensors=tensors, files=files
    )


def _commit(scratch: Path, target: Path, index: CheckpointIndex) -> None:
    for name, record in index.files.items():
        size = (scratch / name).stat().st_size if (scratch / name).is_file() else None
        if size != record.bytes:
            have = "no such file" if size is None else f"one of {size} bytes"
            raise ValueError(
                f"{name} was written with {record.bytes} bytes, and rank 0 sees {have}: "
                f"{target.parent} must be on a file system that all ranks share"
            )
    with (scratch / INDEX).open("x", encoding="utf-8") as out:
        out.write(index.text())
        out.flush()
        os.fsync(out.fileno())
    _settle(scratch)
    old = target.with_name(hidden_folder(target.name, OLD))
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(scratch, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise
    _settle(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _prune(folder: Path, target: Path, keep: int | None) -> None:
    """Removes the oldest beyond `keep`; the new one stays, also where later steps were there before. A folder is hidden first.

    Those that hold numbers which are not finite go first, and such a new one takes the place of no other kind. One that cannot be removed
    stays: the new checkpoint is whole all the same.
    """
    others = [path for _, path in steps(folder) if path != target and (path / INDEX).is_file()]
    excess = 0 if keep is None else max(0, len(others) + 1 - max(1, keep))
    wrong = [path for path in others if _is_wrong(path)]
    sound = [] if _is_wrong(target) else [path for path in others if path not in wrong]
    for path in [*wrong, *sound][:excess]:
        gone = folder / hidden_folder(path.name, REMOVED)
        with contextlib.suppress(OSError):
            os.replace(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _is_wrong(path: Path) -> bool:
    try:
        return bool(read_index(path).meta.get(NONFINITE))
    except CheckpointError:
        return False


def _clear(folder: Path) -> None:
    """Removes what saves that did not end have left; a checkpoint that gave way to none comes back."""
    for path, name, doing in left_behind(folder):
        if doing == OLD and not (folder / name).exists():
            os.replace(path, folder / name)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Waits until the disk has a folder's list of names, where the operating system lets a folder be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
