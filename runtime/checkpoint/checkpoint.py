"""Reads a checkpoint on disk: any box of any of its tensors, whichever plan wrote it, with memory for that box only.

    checkpoint = Checkpoint.open("checkpoints/step_00000120")
    checkpoint.read("fc1.weight", (4, 0), (8, 7))    # an array of 4 x 7
    checkpoint.load_into(record, rank, array)        # the shard that the rank has of it under the current plan

No file is trusted: the index is checked against its schema and each file against the index (`shard_files.py`) before memory is allocated
for its tensors. A `Verification` hashes the contents (`verification.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from partc.runtime.artifact.format import StateRecord
from partc.runtime.artifact.tensors.boxes import Region, full_region, intersection
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.artifact.tensors.safetensors_stream import STORED, read_header, tensor_in

from ..errors import CheckpointError, DamagedError, reason_of
from .index import EMA, FORMAT, CheckpointFile, CheckpointIndex, ShardRecord, TensorRecord
from .newest import take_newest_intact
from .ownership import region_of_rank
from .shard_files import ShardFiles

_AT_ONCE = 1 << 26
"""Bytes of a tensor that are copied at a time."""


def _rows_at_once(shape: Sequence[int], size: int) -> int:
    """Returns the number of rows of the first dim that are copied at a time, for a tensor of `size` bytes."""
    return max(1, _AT_ONCE * shape[0] // size) if shape and size else 1


class Checkpoint(ShardFiles):
    """An opened checkpoint: `index` lists its tensors; `path` is its folder, or the file if the checkpoint is a single safetensors file."""

    def __init__(self, path: Path, index: CheckpointIndex) -> None:
        super().__init__(path, index)
        self._looked_at = 0
        """Bytes copied from mapped files since their pages were last released."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens the checkpoint in a folder or, in a folder of checkpoints, the newest one whose index and file sizes are in order."""
        return take_newest_intact(Path(path), cls.at)[1]

    @classmethod
    def of_file(cls, file: str | Path) -> Checkpoint:
        """Opens any safetensors file as a checkpoint of step 0 that has parameters only."""
        path = Path(file)
        try:
            header = read_header(path)
        except (OSError, ValueError) as error:
            reason = reason_of(error)
            raise CheckpointError(
                f"{path}: is not a safetensors file:  {reason}\n  help: give a whole .safetensors file"
            ) from None
        tensors = {}
        for name, stored in header.items():
            box = full_region(stored.shape)
            piece = ShardRecord(file=path.name, key=name, begin=box.begin, end=box.end)
            tensors[name] = TensorRecord(
                dtype=stored.dtype.shown, shape=stored.shape, kind="parameter", pieces=(piece,) if box.count else ()
            )
        files = {path.name: CheckpointFile(bytes=path.stat().st_size)}
        index = CheckpointIndex(format=FORMAT, partc="", step=0, ranks=1, meta={}, tensors=tensors, files=files)
        return cls(path, index)

    def averaged(self) -> Checkpoint:
        """Returns this checkpoint with the moving averages of parameters in place of the parameters; CheckpointError where it has none."""
        held = self.index.tensors
        averages = {
            one.parameter: one.model_copy(update={"kind": "parameter"}) for one in held.values() if one.kind == EMA
        }
        if not averages:
            raise CheckpointError(
                f"{self.path}: has no moving averages\n  help: train with ema: {{decay: 0.999}}, or leave out --ema"
            )
        tensors = {name: averages.get(name, one) for name, one in held.items() if one.kind != EMA}
        return type(self)(self.path, self.index.model_copy(update={"tensors": tensors}))

    def only(self, is_wanted: Callable[[str], bool]) -> Checkpoint:
        """Returns this checkpoint with only the tensors whose parameter, or own name if there is no parameter, passes `is_wanted`."""
        held = self.index.tensors
        tensors = {name: one for name, one in held.items() if is_wanted(one.parameter or name)}
        return type(self)(self.path, self.index.model_copy(update={"tensors": tensors}))

    def read(self, tensor: str, begin: Sequence[int] | None = None, end: Sequence[int] | None = None) -> Array:
        """Returns the box of a tensor from `begin` to `end` (exclusive) in new memory; by default the full tensor."""
        record = self._record(tensor)
        box = Region(tuple(begin or (0,) * len(record.shape)), tuple(record.shape if end is None else end))
        found = self._shares(tensor, box)
        array = np.empty(box.shape, STORED[record.dtype].numpy)
        self._copy(found, array)
        return array

    def blocks(self, tensor: str) -> Iterator[Array]:
        """Yields the full tensor in blocks along its first dim, each of at most `_AT_ONCE` bytes or of one row."""
        record = self._record(tensor)
        size = STORED[record.dtype].bytes_of(record.shape)
        step = _rows_at_once(record.shape, size)
        for at in range(0, record.shape[0] if record.shape else 1, step):
            begin = (at, *(0 for _ in record.shape[1:])) if record.shape else ()
            end = (min(at + step, record.shape[0]), *record.shape[1:]) if record.shape else ()
            yield self.read(tensor, begin, end)

    def load_into(self, record: StateRecord, rank: int, array: Array) -> None:
        """Copies the rank's shard of the record's tensor into `array`; CheckpointError where type or shape differ."""
        box = region_of_rank(record, rank)
        found = self._record(record.tensor)
        if (found.dtype, found.shape) != (array.dtype.name, tuple(record.shape)) or array.shape != box.shape:
            raise CheckpointError(
                f"{self.path}: '{record.tensor}' is {found.dtype} {list(found.shape)}; rank {rank} has {array.dtype.name} "
                f"{list(array.shape)} of {record.shape}"
            )
        self._copy(self._shares(record.tensor, box), array)

    def _copy(self, parts: Sequence[tuple[tuple[slice, ...], Array]], array: Array) -> None:
        """Copies each mapped array to its place in `array`, a limited number of rows at a time so that few pages of a file stay mapped."""
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

    def _record(self, tensor: str) -> TensorRecord:
        if tensor not in self.index.tensors:
            raise CheckpointError(f"{self.path}: has no tensor '{tensor}'")
        return self.index.tensors[tensor]

    def _shares(self, tensor: str, box: Region) -> list[tuple[tuple[slice, ...], Array]]:
        """Returns, for each stored shard that overlaps `box`, its index inside of the box and the mapped array; nothing is read yet."""
        record = self._record(tensor)
        if not len(box.begin) == len(box.end) == len(record.shape) or any(
            not 0 <= begin <= end <= dim for begin, end, dim in zip(box.begin, box.end, record.shape, strict=True)
        ):
            raise ValueError(
                f"'{tensor}' of {list(record.shape)} has no elements from {list(box.begin)} to {list(box.end)}"
            )
        shares = []
        filled = 0
        for piece in record.pieces:
            shared = intersection(piece.region, box)
            if shared is not None:
                stored, data = self._shard(tensor, piece)
                shares.append((shared.inside(box), tensor_in(data, stored)[shared.inside(piece.region)]))
                filled += shared.count
        if filled != box.count:
            raise DamagedError(
                [f"{self.path}: the shards of '{tensor}' have {filled} of the {box.count} elements of {box}"]
            )
        return shares
