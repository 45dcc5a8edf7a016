"""A checkpoint on disk: any box of any tensor of it, whatever plan wrote it, in memory of the box's size.

    checkpoint = Checkpoint.open("checkpoints/step_00000120")
    checkpoint.read("fc1.weight", (4, 0), (8, 7))     # an array of 4 x 7
    checkpoint.load_into(record, rank, array)         # what this rank has of it under the plan at hand

Nothing is believed: the index is held against its schema, a path against the folder (links resolved), a file's size and every
tensor that is read against the index, before any memory is taken for it. Contents are hashed by a `Verification` (`hashes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from partc.runtime.artifact.boxes import Region, intersection, whole
from partc.runtime.artifact.dtypes import Array, Bytes
from partc.runtime.artifact.format import StateRecord

from ..artifact.safetensors_stream import STORED, MappedFile, Stored, read_header, tensor_in
from ..errors import CheckpointError, DamagedError
from .index import FORMAT, CheckpointFile, CheckpointIndex, ShardRecord, TensorRecord, read_index
from .ownership import held_by

_AT_ONCE = 1 << 26
"""Bytes that are copied together."""


def _rows_at_once(shape: Sequence[int], size: int) -> int:
    """How many rows of the first dim are copied together, of a tensor of so many bytes."""
    return max(1, _AT_ONCE * shape[0] // size) if shape and size else 1


class Checkpoint:
    """An opened checkpoint: `index` says what it holds; `path` is its folder, or the one safetensors file that it is."""

    def __init__(self, path: Path, index: CheckpointIndex) -> None:
        self.path = path
        self.index = index
        self._opened: dict[str, tuple[dict[str, Stored], MappedFile]] = {}
        self._looked_at = 0
        """Bytes of mapped files that were copied since memory was given back."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """The checkpoint in a folder, or the newest of a folder of checkpoints that is whole at first sight."""
        from .newest import find

        return cls.at(find(Path(path)))

    @classmethod
    def at(cls, folder: str | Path) -> Checkpoint:
        """The checkpoint in a folder. DamagedError says all that is wrong with it at first sight, before anything is hashed."""
        place = Path(folder)
        checkpoint = cls(place, read_index(place))
        if problems := checkpoint.missing_files():
            raise DamagedError(problems)
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
                f"{path}: is not a safetensors file:  {reason}\n  help: give a whole .safetensors file"
            ) from None
        tensors = {}
        for name, stored in header.items():
            box = whole(stored.shape)
            piece = ShardRecord(file=path.name, key=name, begin=box.begin, end=box.end)
            tensors[name] = TensorRecord(
                dtype=stored.dtype.shown, shape=stored.shape, kind="parameter", pieces=(piece,) if box.count else ()
            )
        files = {path.name: CheckpointFile(bytes=path.stat().st_size)}
        index = CheckpointIndex(format=FORMAT, partc="", step=0, ranks=1, meta={}, tensors=tensors, files=files)
        return cls(path, index)

    def read(self, tensor: str, begin: Sequence[int] | None = None, end: Sequence[int] | None = None) -> Array:
        """The box of a tensor from `begin` up to and without `end`, in new memory; by default the whole of it."""
        record = self._record(tensor)
        box = Region(tuple(begin or (0,) * len(record.shape)), tuple(record.shape if end is None else end))
        found = self._shares(tensor, box)
        array = np.empty(box.shape, STORED[record.dtype].numpy)
        self._copy(found, array)
        return array

    def blocks(self, tensor: str) -> Iterator[Array]:
        """All of a tensor in blocks of its first dim, each no larger than it must be."""
        record = self._record(tensor)
        size = STORED[record.dtype].bytes_of(record.shape)
        step = _rows_at_once(record.shape, size)
        for at in range(0, record.shape[0] if record.shape else 1, step):
            begin = (at, *(0 for _ in record.shape[1:])) if record.shape else ()
            end = (min(at + step, record.shape[0]), *record.shape[1:]) if record.shape else ()
            yield self.read(tensor, begin, end)

    def load_into(self, record: StateRecord, rank: int, array: Array) -> None:
        """Puts the rank's piece of the record's tensor into its array."""
        box = held_by(record, rank)
        found = self._record(record.tensor)
        if (found.dtype, found.shape) != (array.dtype.name, tuple(record.shape)) or array.shape != box.shape:
            raise CheckpointError(
                f"{self.path}: '{record.tensor}' is {found.dtype} {list(found.shape)}; rank {rank} has {array.dtype.name} "
                f"{list(array.shape)} of {record.shape}"
            )
        self._copy(self._shares(record.tensor, box), array)

    def _copy(self, parts: Sequence[tuple[tuple[slice, ...], Array]], array: Array) -> None:
        """Copies stored parts to their places, so many rows at a time that what is mapped of a file stays small."""
        for place, part in parts:
            there = array[place]
            if not part.shape:
                array[place] = part
                continue
            step = _rows_at_once(part.shape, part.nbytes)
            for at in range(0, len(part), step):
                there[at : at + step] = part[at : at + step]
                self._looked_at += part[at : at + step].nbytes
                if self._looked_at >= _AT_ONCE:
                    self._looked_at = 0
                    for _, file in self._opened.values():
                        file.forget()

    def missing_files(self) -> list[str]:
        """What is wrong with the files at first sight: each absent, out of the folder, or of another size than the index says."""
        found = []
        inside = self.folder.resolve()
        for name, record in self.index.files.items():
            file = self.folder / name
            if not file.exists():
                found.append(f"{file}: is missing")
            elif not file.resolve().is_relative_to(inside):
                found.append(f"{file}: points outside the folder, to {file.resolve()}")
            elif not file.is_file():
                found.append(f"{file}: is not a regular file")
            elif (size := file.stat().st_size) != record.bytes:
                found.append(f"{file}: has {size} bytes, the index says {record.bytes}")
        return found

    def stored(self, tensor: str, piece: ShardRecord) -> Stored:
        """Where a piece of a tensor lies in its file; DamagedError where the file is not sound, or has it otherwise than the index says."""
        return self._opened_piece(tensor, piece)[0]

    @cached_property
    def folder(self) -> Path:
        """Where the files are."""
        return self.path if self.path.is_dir() else self.path.parent

    def _record(self, tensor: str) -> TensorRecord:
        if tensor not in self.index.tensors:
            raise CheckpointError(f"{self.path}: has no tensor '{tensor}'")
        return self.index.tensors[tensor]

    def _shares(self, tensor: str, box: Region) -> list[tuple[tuple[slice, ...], Array]]:
        """The parts of a region that each stored shard has: the index in the region, and a mapped array. Nothing is read yet."""
        record = self._record(tensor)
        if not len(box.begin) == len(box.end) == len(record.shape) or any(
            not 0 <= begin <= end <= dim for begin, end, dim in zip(box.begin, box.end, record.shape, strict=True)
        ):
            raise ValueError(f"'{tensor}' of {list(record.shape)} has no box from {list(box.begin)} to {list(box.end)}")
        found = []
        filled = 0
        for piece in record.pieces:
            shared = intersection(piece.region, box)
            if shared is not None:
                stored, data = self._opened_piece(tensor, piece)
                found.append((shared.inside(box), tensor_in(data, stored)[shared.inside(piece.region)]))
                filled += shared.count
        if filled != box.count:
            raise DamagedError(
                [f"{self.path}: the pieces of '{tensor}' have {filled} of the {box.count} elements of {box}"]
            )
        return found

    def _opened_piece(self, tensor: str, piece: ShardRecord) -> tuple[Stored, Bytes]:
        file, record = self.folder / piece.file, self._record(tensor)
        if piece.file not in self._opened:
            try:
                self._opened[piece.file] = read_header(file, self.index.files[piece.file].header), MappedFile.of(file)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise DamagedError([f"{file}: {reason}"]) from None
        header, mapped = self._opened[piece.file]
        stored = header.get(piece.key)
        if stored is None or (stored.dtype.shown, stored.shape) != (record.dtype, piece.region.shape):
            have = "not there" if stored is None else f"{stored.dtype.shown} {list(stored.shape)}"
            wanted = f"{record.dtype} {list(piece.region.shape)}"
            raise DamagedError([f"{file}: '{piece.key}' of '{tensor}' is {have}; the index says {wanted}"])
        return stored, mapped.data
