"""The index of a checkpoint, `checkpoint.json`: its schema, its text, and what a folder of checkpoints holds.

    checkpoints/
      step_00000120/
        checkpoint.json          step, meta, every tensor by its global name with the pieces that make it, every file's hash
        rank_0000.safetensors    the pieces that rank 0 wrote; a key is the tensor's name, and the box of a piece: fc1.weight[0:4, 0:7]
        rank_0001.safetensors
      step_00000140/

The index is written last: a folder without one is no checkpoint. While something is done to a checkpoint its folder is hidden:
`.step_00000160.saving` is being written, `.step_00000120.removed` is being removed, and `.step_00000140.old` is whole and
gives way to a new `step_00000140`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from partc.runtime.errors import PartcError
from partc.runtime.format import FileRecord, stays_inside
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from .checkpoint_box import Box
from .checkpoint_file import STORED

INDEX = "checkpoint.json"
FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(saving|old|removed)")
SAVING, OLD, REMOVED = "saving", "old", "removed"

Kind = Literal["parameter", "optimizer", "statistics"]


class CheckpointError(PartcError):
    """A checkpoint is not whole, or cannot be written, or does not fit; the message says all that is wrong with it."""


def _inside(path: str) -> str:
    if not stays_inside(path):
        raise ValueError(f"the path '{path}' leaves the folder")
    return path


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PieceRecord(_Record):
    """A box of a tensor: the file and the key in it under which it lies."""

    file: Annotated[str, AfterValidator(_inside)]
    key: str
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Where in the tensor it lies."""
        return Box(self.begin, self.end)


class TensorRecord(_Record):
    """A tensor by its numpy dtype and whole shape; `parameter`: of whom an optimizer's tensor is."""

    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    parameter: str = ""
    pieces: tuple[PieceRecord, ...]

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return STORED[self.dtype].bytes_of(self.shape)


class CheckpointIndex(_Record):
    """What a checkpoint holds; `ranks` wrote it, `meta` is whatever the training run wants back."""

    format: Literal[1]
    partc: str
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    meta: dict[str, JsonValue]
    tensors: dict[str, TensorRecord]
    files: dict[Annotated[str, AfterValidator(_inside)], FileRecord]

    def text(self) -> str:
        """The index as JSON, a line for each tensor and file: it can be read, and compared line by line."""
        data = self.model_dump(mode="json")
        lists = {key: data.pop(key) for key in ("tensors", "files")}
        lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in data.items()]
        for key, entries in lists.items():
            inner = ",\n".join(
                f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(entry, ensure_ascii=False)}"
                for name, entry in entries.items()
            )
            lines.append(f' "{key}": {{\n{inner}\n }}' if entries else f' "{key}": {{}}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def step_folder(step: int) -> str:
    """The name of a step's folder."""
    return f"step_{step:08d}"


def hidden_folder(name: str, doing: str) -> str:
    """The name that the folder of a step has while something is done to it."""
    return f".{name}.{doing}"


def rank_tensors(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank_{rank:04d}.safetensors"


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, the oldest first: all that have an index, one that was about to give way too."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        hidden = _HIDDEN.fullmatch(path.name)
        shown = _STEP.fullmatch(hidden[1] if hidden and hidden[2] == OLD else path.name)
        if shown and (path / INDEX).is_file():
            found[int(shown[1])] = path
    return sorted(found.items())


def left_behind(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The hidden folders of saves that did not end: each with the name that it had or was to have, and what was done."""
    for path in sorted(folder.iterdir()):
        if (hidden := _HIDDEN.fullmatch(path.name)) is not None:
            yield path, hidden[1], hidden[2]


def read_index(folder: Path) -> CheckpointIndex:
    """The index of a checkpoint's folder, sound in itself; the files are not looked at. CheckpointError says what is wrong."""
    file = folder / INDEX
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: has no {INDEX}\n  help: give a folder that `partc train` wrote, such as step_00000120"
        )
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}\n  help: take another checkpoint") from None
    if isinstance(data, dict) and (version := data.get("format")) != FORMAT:
        raise CheckpointError(
            f"{file}: is of format {version!r}, this partc reads format {FORMAT}\n"
            f"  help: read it with the partc that wrote it ({data.get('partc')})"
        )
    try:
        index = CheckpointIndex.model_validate(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'the whole'}: {item['msg']}" for item in error.errors()]
    else:
        problems = list(_contradictions(index))
        if not problems:
            return index
    lines = "\n".join(f"{file}: {problem}" for problem in problems)
    raise CheckpointError(f"{lines}\n  help: take another checkpoint")


def _contradictions(index: CheckpointIndex) -> Iterator[str]:
    """What a schema cannot say: known types, boxes within their tensors that have as many elements, files that are listed."""
    for name, tensor in index.tensors.items():
        if tensor.dtype not in STORED:
            yield f"tensor '{name}' is of type '{tensor.dtype}'; known are {', '.join(STORED)}"
        if any(dim < 0 for dim in tensor.shape):
            yield f"tensor '{name}' has the shape {list(tensor.shape)}"
            continue
        for piece in tensor.pieces:
            if piece.file not in index.files:
                yield f"tensor '{name}' has a piece in {piece.file}, which is not listed"
        outside = [piece for piece in tensor.pieces if not _lies_in(piece, tensor.shape)]
        for piece in outside:
            yield f"tensor '{name}' of {list(tensor.shape)} has a piece {list(piece.begin)} to {list(piece.end)}"
        count = 0 if outside else sum(piece.box.count for piece in tensor.pieces)
        if not outside and count != math.prod(tensor.shape):
            yield f"tensor '{name}' has {math.prod(tensor.shape)} elements, and its pieces {count}"


def _lies_in(piece: PieceRecord, shape: tuple[int, ...]) -> bool:
    if not len(piece.begin) == len(piece.end) == len(shape):
        return False
    return all(0 <= begin < end <= dim for begin, end, dim in zip(piece.begin, piece.end, shape, strict=True))
