"""The index of a checkpoint, `checkpoint.json`: its schema, its text, and the contents of a folder of checkpoints.

    checkpoints/
      step_00000120/
        checkpoint.json          step, meta, every tensor by its global name with the pieces that make it, every file's header's hash
        rank_0000.safetensors    the pieces that rank 0 wrote; a key is the tensor's name, and the box of a piece: fc1.weight[0:4, 0:7]
        rank_0001.safetensors
      step_00000140/

The index is written last: a folder without one is not a checkpoint. Its last line is the hash of the lines before it, and a file's header
has the hashes of its tensors: so one hash covers the whole checkpoint, and each part can be checked alone.

A checkpoint's folder is hidden while an operation on it runs: `.step_00000160.saving` is being written, `.step_00000120.removed` is being
removed, and `.step_00000140.old` is complete and is being replaced by a new `step_00000140`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from partc.runtime.artifact.format import Record, inside
from partc.runtime.artifact.tensors.boxes import Region, overlap
from partc.runtime.artifact.tensors.safetensors_stream import STORED, is_shape
from partc.runtime.errors import CheckpointError, DamagedError, reason_of
from pydantic import AfterValidator, Field, JsonValue, ValidationError

from ..files.counted import CHECKPOINT_INDEX, parse_json
from ..files.regular import read_regular

INDEX = "checkpoint.json"
NONFINITE = "nonfinite"
"""Key of `meta`: the checkpoint has numbers that are not finite."""
ADAPTER = "adapter"
"""Key of `meta`: the alpha of each module of the trained adapter."""
SKIPPED = "skipped"
"""Key of `meta`: the number of its steps that changed nothing."""
FORMAT: Literal[2] = 2
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64
_TOLD = 20
"""The most problems of one kind that a message lists."""
_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(saving|old|removed)")
SAVING, OLD, REMOVED = "saving", "old", "removed"

Kind = Literal["parameter", "optimizer", "statistics", "scale", "rest", "ema"]
EMA: Literal["ema"] = "ema"
"""The kind of the moving average of a parameter, and the last part of its name."""


class ShardRecord(Record):
    """A stored shard of a tensor: its file, and its key in that file."""

    file: Annotated[str, AfterValidator(inside)]
    key: str
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def region(self) -> Region:
        """The region of the tensor that it is."""
        return Region(self.begin, self.end)


class TensorRecord(Record):
    """A tensor: its numpy dtype and global shape. `parameter`: the parameter to which an optimizer's tensor belongs."""

    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    parameter: str = ""
    pieces: tuple[ShardRecord, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the global tensor."""
        return STORED[self.dtype].bytes_of(self.shape)

    @property
    def count(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


class CheckpointFile(Record):
    """A file: its size, and the SHA-256 of its header."""

    bytes: int = Field(ge=0)
    header: str = ""


class CheckpointIndex(Record):
    """What a checkpoint holds; `ranks` wrote it, `meta` is whatever the training run wants back."""

    format: Literal[2]
    partc: str
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    meta: dict[str, JsonValue]
    tensors: dict[str, TensorRecord]
    files: dict[Annotated[str, AfterValidator(inside)], CheckpointFile]

    def text(self) -> str:
        """Returns the index as JSON, a line for each tensor and file, to compare indices; the last is the hash of the others."""
        data = self.model_dump(mode="json")
        lists = {key: data.pop(key) for key in ("tensors", "files")}
        lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in data.items()]
        for key, entries in lists.items():
            inner = ",\n".join(
                f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(entry, ensure_ascii=False)}"
                for name, entry in entries.items()
            )
            lines.append(f' "{key}": {{\n{inner}\n }}' if entries else f' "{key}": {{}}')
        return sealed("{\n" + ",\n".join(lines))


def sealed(text: str) -> str:
    """Returns the text of an index with its last line, the hash of the lines before it."""
    return f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'


def step_folder(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"step_{step:08d}"


def hidden_folder(name: str, doing: str) -> str:
    """Returns the name of a step's folder while an operation on it runs."""
    return f".{name}.{doing}"


def rank_tensors(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"rank_{rank:04d}.safetensors"


def is_step_name(name: str) -> bool:
    """Whether it is the name of a checkpoint's folder."""
    return _STEP.fullmatch(name) is not None


def is_step(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint, or is one."""
    return is_step_name(path.name) or os.path.lexists(path / INDEX)


def steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints in a folder, complete or not, the oldest first; includes one whose replacement is missing."""
    by_step = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        hidden = _HIDDEN.fullmatch(path.name)
        shown = _STEP.fullmatch(hidden[1] if hidden and hidden[2] == OLD else path.name)
        if shown and path.is_dir():
            by_step[int(shown[1])] = path
    return sorted(by_step.items())


def stale_files(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields the hidden folders of saves that did not end: each with the checkpoint's name, and the operation."""
    for path in sorted(folder.iterdir()):
        if (hidden := _HIDDEN.fullmatch(path.name)) is not None:
            yield path, hidden[1], hidden[2]


def read_index(folder: Path) -> CheckpointIndex:
    """Returns the index of a checkpoint's folder, checked in itself, without its files; raises DamagedError with the faults."""
    file = folder / INDEX
    data = _parsed(file, _read(file))
    try:
        index = CheckpointIndex.model_validate(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'the whole'}: {item['msg']}" for item in error.errors()]
    else:
        problems = list(_contradictions(index))
        named = _STEP.fullmatch(folder.name)
        if named and int(named[1]) != index.step:
            problems.append(f"the folder has the name of another step: it holds step {index.step}")
        if not problems:
            return index
    raise DamagedError([f"{file}: {problem}" for problem in problems[:_TOLD]])


def _read(file: Path) -> bytes:
    """Returns the bytes of an index, which must be a regular file of moderate size."""
    try:
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError([f"{file}: is not a regular file"])
        return read_regular(file, CHECKPOINT_INDEX.bytes)
    except OSError as error:
        raise DamagedError(
            [f"{file}: {'is missing' if isinstance(error, FileNotFoundError) else reason_of(error)}"]
        ) from None


def _parsed(file: Path, text: bytes) -> dict[str, object]:
    """Returns the contents of an index, once its hash is verified."""
    seal = _SEAL.fullmatch(text[-_SEAL_BYTES:])
    if seal and seal[1].decode() != hashlib.sha256(text[:-_SEAL_BYTES]).hexdigest():
        raise DamagedError([f"{file}: was changed: its last line is not the SHA-256 of the lines before it"])
    try:
        data = parse_json(text, CHECKPOINT_INDEX)
    except ValueError as error:
        raise DamagedError([f"{file}: is not JSON: {error}"]) from None
    if not isinstance(data, dict):
        raise DamagedError([f"{file}: holds no JSON object"])
    version = data.get("format")
    if version != FORMAT or isinstance(version, bool):
        raise CheckpointError(
            f"{file}: is of format {version!r}, this partc reads format {FORMAT}\n"
            f"  help: read it with the partc that wrote it ({data.get('partc')})"
        )
    if not seal or data.pop("sha256", None) != seal[1].decode():
        raise DamagedError([f"{file}: was changed: its last line is not the SHA-256 of the lines before it"])
    return data


def _contradictions(index: CheckpointIndex) -> Iterator[str]:
    """Yields violations of laws beyond the schema: known types, shards inside their tensors that cover all elements, listed files."""
    for name, tensor in index.tensors.items():
        if tensor.dtype not in STORED:
            yield f"tensor '{name}' is of type '{tensor.dtype}'; known are {', '.join(STORED)}"
        if not is_shape(list(tensor.shape)):
            yield f"tensor '{name}' has a shape of {len(tensor.shape)} dims, {str(list(tensor.shape))[:60]}"
            continue
        for piece in tensor.pieces:
            if piece.file not in index.files:
                yield f"tensor '{name}' has a shard in {piece.file}, which is not listed"
        outside = [piece for piece in tensor.pieces if not _is_inside(piece, tensor.shape)]
        for piece in outside:
            yield f"tensor '{name}' of {list(tensor.shape)} has a shard {list(piece.begin)} to {list(piece.end)}"
        if outside:
            continue
        count = sum(piece.region.count for piece in tensor.pieces)
        if count != tensor.count:
            yield f"tensor '{name}' has {tensor.count} elements, and its shards {count}"
        elif (twice := overlap([piece.region for piece in tensor.pieces])) is not None:
            yield f"tensor '{name}' has the elements {twice} in two shards"


def _is_inside(piece: ShardRecord, shape: tuple[int, ...]) -> bool:
    if not len(piece.begin) == len(piece.end) == len(shape):
        return False
    return all(0 <= begin < end <= dim for begin, end, dim in zip(piece.begin, piece.end, shape, strict=True))
