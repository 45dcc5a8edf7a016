"""Writes a checkpoint so that a crash at any moment leaves the previous one intact.

Each rank writes the regions that it owns into a hidden folder next to the future checkpoint, and flushes them to disk. When all ranks have
done so, rank 0 writes the index and renames the folder: before the rename there is no new checkpoint, after it a complete one. Ranks
exchange one line of text each: the size and hash of a file, or the reason why it was not written. If any rank fails, the save fails on all
ranks with the reason of each.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from partc.runtime.artifact.format import StateRecord
from partc.runtime.artifact.tensors.dtypes import Array, dense
from partc.runtime.artifact.tensors.safetensors_stream import Stored, write_tensors
from pydantic import JsonValue

from ..artifact.format import release
from ..errors import CheckpointError, PartcError
from ..files.replace import make_folder, move_folder, remove_inside
from ..files.writers import new_file
from .index import (
    FORMAT,
    INDEX,
    OLD,
    SAVING,
    CheckpointFile,
    CheckpointIndex,
    ShardRecord,
    TensorRecord,
    hidden_folder,
    rank_tensors,
    step_folder,
)
from .lock import Lock
from .ownership import Owned, owners
from .run_list import KEEP_ALL, Retention, add, clear, discard, foreign_entries, listed_checkpoints, prune

Share: TypeAlias = Callable[[str], Sequence[str]]
"""A collective: takes this rank's text and gives the texts of all ranks, in their order."""
_DONE, _FAILED = "+", "-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Save:
    """One rank's part in saving a step: `begin`, `write` and `commit`, each called once all ranks have finished the one before.

    `pieces` are this rank's tensors; all other arguments are the same on every rank. `lock` is rank 0's lock of the folder; without it the
    save takes the lock itself until `release`.
    """

    folder: Path
    step: int
    rank: int
    pieces: Sequence[tuple[StateRecord, Array]]
    records: Sequence[StateRecord]
    meta: Mapping[str, JsonValue]
    retention: Retention = KEEP_ALL
    lock: Lock | None = None
    owned: dict[str, list[Owned]] = field(default_factory=dict)
    _begun: bool = False
    _own: Lock | None = None

    @property
    def target(self) -> Path:
        """The folder that the checkpoint gets."""
        return self.folder / step_folder(self.step)

    @property
    def scratch(self) -> Path:
        """The hidden folder into which the files are written."""
        return self.folder / hidden_folder(self.target.name, SAVING)

    def begin(self) -> str:
        """Computes the owners; on rank 0 also creates the hidden folder."""
        self.owned.update(owners(self.records))
        if self.rank == 0:
            if self.lock is None:
                self._own = Lock(self.folder)
            clear(self.folder)
            refuse_others(self.target)
            make_folder(self.scratch)
            self._begun = True
        return ""

    def find(self) -> str:
        """Checks that this rank sees the hidden folder, and creates it where it does not."""
        make_folder(self.scratch, exist_ok=True)
        self._begun = True
        return ""

    def write(self) -> str:
        """Writes the regions that this rank owns; returns the record of the file for rank 0 as JSON, empty where the rank owns nothing."""
        record = _write(self.scratch / rank_tensors(self.rank), self.rank, self.pieces, self.owned)
        return "" if record is None else record.model_dump_json()

    def commit(self, said: Sequence[str]) -> str:
        """On rank 0, writes the index from the texts that `write` has returned on all ranks, and gives the checkpoint its name."""
        if self.rank == 0:
            index = index_of(self.step, self.records, self.owned, self.meta, said)
            _commit(self.scratch, self.target, index, self.retention)
        return ""

    def discard(self) -> None:
        """Removes the files that this save has written, if it had begun."""
        if self._begun and self.rank == 0:
            discard(self.scratch)
        elif self._begun:
            with contextlib.suppress(OSError):
                remove_inside(self.scratch, rank_tensors(self.rank).__eq__)

    def release(self) -> None:
        """Releases the lock that was taken for this save alone."""
        if self._own is not None:
            self._own.release()
            self._own = None


def save(
    folder: Path,
    step: int,
    rank: int,
    pieces: Sequence[tuple[StateRecord, Array]],
    records: Sequence[StateRecord],
    meta: Mapping[str, JsonValue],
    share: Share,
    retention: Retention = KEEP_ALL,
    lock: Lock | None = None,
) -> Path:
    """Writes the checkpoint of a step into `folder`, which all ranks share; removes those beyond `retention`; returns its path. Collective.

    The arguments are those of `Save`. When it returns on any rank, the checkpoint is complete. CheckpointError is raised on all ranks; the
    checkpoints that existed before are then unchanged.
    """
    saving = Save(folder, step, rank, pieces, records, meta, retention, lock)

    def write() -> str:
        saving.find()
        return saving.write()

    try:
        on_all_ranks(saving.target, share, saving.begin)
        said = on_all_ranks(saving.target, share, write)
        on_all_ranks(saving.target, share, lambda: saving.commit(said))
    except CheckpointError:
        saving.discard()
        raise
    finally:
        saving.release()
    return saving.target


def refuse_others(target: Path) -> None:
    """Raises ValueError where the checkpoint's path is not a folder, or contains files that partc did not write."""
    if os.path.lexists(target) and (found := foreign_entries(target)):
        what = f"holds '{found[0]}', which partc has not written" if found != ["."] else "is not a folder"
        raise ValueError(f"{target.name} exists and {what}: move it away")


def on_all_ranks(target: Path, share: Share, act: Callable[[], str]) -> list[str]:
    """Calls `act` on every rank and returns its texts in the order of ranks; collective.

    CheckpointError on all ranks where `act` raises on any.
    """
    text, failure = outcome(act)
    return succeeded(target, share(text), failure)


def outcome(act: Callable[[], str]) -> tuple[str, Exception | None]:
    """Calls `act`; returns its result, or the reason of its failure, as a text for other ranks, and the exception if any."""
    try:
        return _DONE + act(), None
    except Exception as error:
        return _FAILED + _reason(error), error


def succeeded(target: Path, said: Sequence[str], failure: Exception | None = None) -> list[str]:
    """Returns the results in the outcomes of all ranks; CheckpointError where any outcome is a failure."""
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
            "\n".join([*lines, "  help: earlier checkpoints are intact; fix this and resume from the last one"])
        ) from failure
    return [one.removeprefix(_DONE) for one in said]


def _reason(error: Exception) -> str:
    match error:
        case OSError(strerror=str(reason), filename=file) if file is not None:
            full = "; make room on the disk" if error.errno in _FULL else ""
            return f"{file}: {reason}{full}"
        case OSError() | ValueError() | PartcError():
            return str(error).replace("\n  help: ", "; ")
    return f"{type(error).__name__}: {error}"


def _write(
    path: Path, rank: int, pieces: Sequence[tuple[StateRecord, Array]], owned: Mapping[str, Sequence[Owned]]
) -> CheckpointFile | None:
    """Writes the regions that a rank owns; returns the record of the file, or None where the rank owns nothing."""
    arrays = {record.value: (record, array) for record, array in pieces}
    mine: dict[str, tuple[Owned, Array]] = {}
    problems = []
    for tensor, some in owned.items():
        for region in some:
            if region.rank != rank:
                continue
            if region.value not in arrays:
                problems.append(f"'{tensor}', which is '{region.value}' here, was not given")
                continue
            record, array = arrays[region.value]
            dtype = dense(record.type)
            if dtype is None or array.dtype != dtype.numpy or array.shape != region.held.shape:
                problems.append(
                    f"'{tensor}' was given as {array.dtype.name} {list(array.shape)}; the rank's shard is "
                    f"{record.type} {list(region.held.shape)}"
                )
                continue
            mine[_key(tensor, region, record.shape)] = region, array
    if problems:
        raise ValueError("\n".join(problems))
    if not mine:
        return None
    types = {key: dense(arrays[one.value][0].type) for key, (one, _) in mine.items()}
    stored = {key: Stored(dtype, mine[key][0].region.shape) for key, dtype in types.items() if dtype is not None}
    file = write_tensors(path, stored, lambda key: [mine[key][1][mine[key][0].region.inside(mine[key][0].held)]])
    return CheckpointFile(bytes=file.bytes, header=file.header)


def _key(tensor: str, owned: Owned, shape: Sequence[int]) -> str:
    return tensor if owned.region.shape == tuple(shape) else f"{tensor}{owned.region}"


def index_of(
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
        if record.tensor in tensors:
            continue
        tensors[record.tensor] = TensorRecord(
            dtype=dtype.shown,
            shape=tuple(record.shape),
            kind=record.kind,
            parameter=record.parameter,
            pieces=tuple(
                ShardRecord(
                    file=rank_tensors(one.rank),
                    key=_key(record.tensor, one, record.shape),
                    begin=one.region.begin,
                    end=one.region.end,
                )
                for one in owned[record.tensor]
            ),
        )
    files = {rank_tensors(rank): CheckpointFile.model_validate_json(text) for rank, text in enumerate(said) if text}
    return CheckpointIndex(
        format=FORMAT, partc=release(), step=step, ranks=len(said), meta=dict(meta), tensors=tensors, files=files
    )


def _commit(scratch: Path, target: Path, index: CheckpointIndex, retention: Retention) -> None:
    """Writes the index, renames the hidden folder to the checkpoint's name, and removes the run's checkpoints beyond `retention`."""
    for name, record in index.files.items():
        size = (scratch / name).stat().st_size if (scratch / name).is_file() else None
        if size != record.bytes:
            have = "no such file" if size is None else f"one of {size} bytes"
            raise ValueError(
                f"{name} was written with {record.bytes} bytes, and rank 0 sees {have}: "
                f"{target.parent} must be on a file system that all ranks share"
            )
    text = index.text()
    with new_file(scratch / INDEX) as out:
        out.write(text.encode())
        out.flush()
        os.fsync(out.fileno())
    _sync_folder(scratch)
    folder = target.parent
    listed = add(folder, listed_checkpoints(folder) if retention.goes_on else {}, target.name, text)
    old = target.with_name(hidden_folder(target.name, OLD))
    if target.exists():
        move_folder(target, old)
    try:
        move_folder(scratch, target)
    except OSError:
        if old.exists():
            move_folder(old, target)
        raise
    _sync_folder(folder)
    discard(old)
    prune(folder, target, listed, retention)


def _sync_folder(folder: Path) -> None:
    """Flushes a folder's directory entries to disk, on systems that can open folders."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
