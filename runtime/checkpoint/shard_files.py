"""The files of a checkpoint: each is opened and mapped at its first use, and checked against the index before that.

A file's path, with links resolved, must be inside of the folder; its size and each tensor that is read must match the index.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Self

from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.artifact.tensors.safetensors_stream import MappedFile, Stored, read_header

from ..errors import DamagedError, reason_of
from .index import CheckpointIndex, ShardRecord, read_index


class ShardFiles:
    """The index and the files of a checkpoint; `path` is its folder, or the file if the checkpoint is a single safetensors file."""

    def __init__(self, path: Path, index: CheckpointIndex) -> None:
        self.path = path
        self.index = index
        self._opened: dict[str, tuple[dict[str, Stored], MappedFile]] = {}

    @classmethod
    def at(cls, folder: str | Path) -> Self:
        """Opens the checkpoint in a folder; nothing is hashed.

        DamagedError lists files that are missing, outside of the folder or of another size than the index says.
        """
        place = Path(folder)
        opened = cls(place, read_index(place))
        if problems := opened.missing_files():
            raise DamagedError(problems)
        return opened

    def missing_files(self) -> list[str]:
        """Returns a problem for each file that is missing, outside of the folder, not regular, or of another size than the index says."""
        problems = []
        inside = self.folder.resolve()
        for name, record in self.index.files.items():
            file = self.folder / name
            if not file.exists():
                problems.append(f"{file}: is missing")
            elif not file.resolve().is_relative_to(inside):
                problems.append(f"{file}: points outside the folder, to {file.resolve()}")
            elif not file.is_file():
                problems.append(f"{file}: is not a regular file")
            elif (size := file.stat().st_size) != record.bytes:
                problems.append(f"{file}: has {size} bytes, the index says {record.bytes}")
        return problems

    def stored(self, tensor: str, piece: ShardRecord) -> Stored:
        """Returns the location of a shard in its file; DamagedError where the file is invalid or contradicts the index."""
        return self._shard(tensor, piece)[0]

    @cached_property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def _shard(self, tensor: str, piece: ShardRecord) -> tuple[Stored, Bytes]:
        file, record = self.folder / piece.file, self.index.tensors[tensor]
        if piece.file not in self._opened:
            try:
                self._opened[piece.file] = read_header(file, self.index.files[piece.file].header), MappedFile.of(file)
            except (OSError, ValueError) as error:
                raise DamagedError([f"{file}: {reason_of(error)}"]) from None
        header, mapped = self._opened[piece.file]
        stored = header.get(piece.key)
        if stored is None or (stored.dtype.shown, stored.shape) != (record.dtype, piece.region.shape):
            have = "not there" if stored is None else f"{stored.dtype.shown} {list(stored.shape)}"
            wanted = f"{record.dtype} {list(piece.region.shape)}"
            raise DamagedError([f"{file}: '{piece.key}' of '{tensor}' is {have}; the index says {wanted}"])
        return stored, mapped.data
