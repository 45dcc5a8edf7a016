"""A checkpoint on disk: any box of any tensor of it, whatever plan wrote it, in memory of the box's size.

    checkpoint = Checkpoint.open(latest("checkpoints"))
    checkpoint.read("fc1.weight", (4, 0), (8, 7))     # an array of 4 x 7
    checkpoint.load_into(record, rank, array)         # what this rank has of it under the plan at hand

Nothing is believed: the index is held against its schema, a path against the folder (links resolved), a file's size and every
tensor that is read against the index. Contents are hashed by `changed_files`, which ranks can share out among them, and by
`partc checkpoint verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from partc.runtime.artifact import sha256
from partc.runtime.dtypes import Array, Bytes
from partc.runtime.errors import UsageError
from partc.runtime.format import FileRecord, StateRecord

from .checkpoint_box import Box, common, whole
from .checkpoint_file import STORED, Stored, mapped, read_header, tensor_in
from .checkpoint_index import (
    INDEX,
    CheckpointError,
    CheckpointIndex,
    PieceRecord,
    TensorRecord,
    read_index,
    steps,
)
from .checkpoint_owners import held_by
from .finite import NONFINITE


class Checkpoint:
    """An opened checkpoint: `index` says what it holds; `path` is its folder, or the one safetensors file that it is."""

    def __init__(self, path: Path, index: CheckpointIndex) -> None:
        self.path = path
        self.index = index
        self._opened: dict[str, tuple[dict[str, Stored], Bytes]] = {}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """The checkpoint in a folder, or the latest of a folder of checkpoints. CheckpointError says all that is wrong with it."""
        folder = find(Path(path))
        checkpoint = cls(folder, read_index(folder))
        problems = checkpoint.missing_files()
        if problems:
            raise CheckpointError(
                "\n".join([*problems, "  help: take another checkpoint, or copy the whole folder again"])
            )
        return checkpoint

    @classmethod
    def of_file(cls, file: str | Path) -> Checkpoint:
        """Any safetensors file as a checkpoint of step 0 that has parameters only."""
        path = Path(file)
        try:
            header = read_header(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"{path}: is no safetensors file: {reason}\n  help: give a whole .safetensors file"
            ) from None
        tensors = {}
        for name, stored in header.items():
            box = whole(stored.shape)
            piece = PieceRecord(file=path.name, key=name, begin=box.begin, end=box.end)
            tensors[name] = TensorRecord(
                dtype=stored.dtype.shown, shape=stored.shape, kind="parameter", pieces=(piece,) if box.count else ()
            )
        files = {path.name: FileRecord(bytes=path.stat().st_size, sha256="")}
        index = CheckpointIndex(format=1, partc="", step=0, ranks=1, meta={}, tensors=tensors, files=files)
        return cls(path, index)

    def read(self, tensor: str, begin: Sequence[int] | None = None, end: Sequence[int] | None = None) -> Array:
        """The box of a tensor from `begin` up to and without `end`, in new memory; by default the whole of it."""
        record = self._record(tensor)
        box = Box(tuple(begin or (0,) * len(record.shape)), tuple(record.shape if end is None else end))
        array = np.empty(box.shape, STORED[record.dtype].numpy)
        self._fill(tensor, box, array)
        return array

    def load_into(self, record: StateRecord, rank: int, array: Array) -> None:
        """Puts the rank's piece of the record's tensor into its array."""
        box = held_by(record, rank)
        found = self._record(record.tensor)
        if (found.dtype, found.shape) != (array.dtype.name, tuple(record.shape)) or array.shape != box.shape:
            raise CheckpointError(
                f"{self.path}: '{record.tensor}' is {found.dtype} {list(found.shape)}; rank {rank} has {array.dtype.name} "
                f"{list(array.shape)} of {record.shape}"
            )
        self._fill(record.tensor, box, array)

    def missing_files(self) -> list[str]:
        """What is wrong with the files at first sight: each absent, out of the folder, or of another size than the index says."""
        found = []
        for name, record in self.index.files.items():
            file = self._folder / name
            if not file.is_file():
                found.append(f"{file}: is missing")
            elif not file.resolve().is_relative_to(self._folder.resolve()):
                found.append(f"{file}: leads out of the folder, to {file.resolve()}")
            elif (size := file.stat().st_size) != record.bytes:
                found.append(f"{file}: has {size} bytes, the index says {record.bytes}")
        return found

    def changed_files(self, rank: int = 0, ranks: int = 1) -> list[str]:
        """The files whose contents are not those that were written; of several ranks each hashes its share of the files."""
        found = []
        for name in list(self.index.files)[rank::ranks]:
            digest, wanted = sha256(self._folder / name), self.index.files[name].sha256
            if digest != wanted:
                found.append(
                    f"{self._folder / name}: was changed: its SHA-256 begins with {digest[:12]}, the index says {wanted[:12]}"
                )
        return found

    @cached_property
    def _folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def _record(self, tensor: str) -> TensorRecord:
        if tensor not in self.index.tensors:
            raise CheckpointError(f"{self.path}: has no tensor '{tensor}'")
        return self.index.tensors[tensor]

    def _fill(self, tensor: str, box: Box, array: Array) -> None:
        record = self._record(tensor)
        if not len(box.begin) == len(box.end) == len(record.shape) or any(
            not 0 <= begin <= end <= dim for begin, end, dim in zip(box.begin, box.end, record.shape, strict=True)
        ):
            raise ValueError(f"'{tensor}' of {list(record.shape)} has no box from {list(box.begin)} to {list(box.end)}")
        filled = 0
        for piece in record.pieces:
            shared = common(piece.box, box)
            if shared is not None:
                array[shared.inside(box)] = self._mapped(tensor, record, piece)[shared.inside(piece.box)]
                filled += shared.count
        if filled != box.count:
            raise CheckpointError(
                f"{self.path}: the pieces of '{tensor}' have {filled} of the {box.count} elements of {box}"
            )

    def _mapped(self, tensor: str, record: TensorRecord, piece: PieceRecord) -> Array:
        file = self._folder / piece.file
        if piece.file not in self._opened:
            try:
                self._opened[piece.file] = read_header(file), mapped(file)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file}: {error}\n  help: take another checkpoint") from None
        header, data = self._opened[piece.file]
        stored = header.get(piece.key)
        if stored is None or (stored.dtype.shown, stored.shape) != (record.dtype, piece.box.shape):
            have = "none" if stored is None else f"{stored.dtype.shown} {list(stored.shape)}"
            raise CheckpointError(
                f"{file}: '{piece.key}' of '{tensor}' is {have}; the index says {record.dtype} {list(piece.box.shape)}\n"
                "  help: take another checkpoint"
            )
        return tensor_in(data, stored)


def find(path: Path) -> Path:
    """The checkpoint's folder that a path means: itself, or the latest in it."""
    if (path / INDEX).is_file():
        return path
    found = latest(path)
    if found is not None:
        return found
    if not path.exists():
        raise UsageError(f"{path}: there is no such folder\n  help: give a folder that `partc train` wrote")
    if any(path.glob("step_*")) if path.is_dir() else False:
        raise CheckpointError(
            f"{path}: none of the checkpoints in it is whole\n  help: `partc checkpoint verify` says why of one"
        )
    raise UsageError(f"{path}: is no checkpoint, and has none in it\n  help: give a folder that `partc train` wrote")


def latest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, by its step; hidden and incomplete ones are passed over. None: there is none.

    One that holds numbers which are not finite is taken only where there is no other.
    """
    wrong: Path | None = None
    for _, path in reversed(steps(Path(folder))):
        try:
            index = read_index(path)
        except CheckpointError:
            continue
        if not Checkpoint(path, index).missing_files():
            if not index.meta.get(NONFINITE):
                return path
            wrong = wrong or path
    return wrong
