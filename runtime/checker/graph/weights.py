"""Checks a rank file's weights: external tensors are inside their files, each exactly at its own offset, with the right contents.

A weight's metadata state which part of which tensor it is (`fc1.weight[0:8, 16:32]`). So do the metadata of the file that has its data,
for each tensor by its name there. A weight inside the rank file itself has a hash in its metadata.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from onnx import ModelProto, TensorProto
from partc.runtime.artifact.format import DIGEST, PIECE, STORED, FileRecord, Manifest, StateRecord, stays_inside
from partc.runtime.artifact.graph.onnx_graph import metadata_of, model_tensors
from partc.runtime.artifact.tensors.dtypes import element
from partc.runtime.artifact.tensors.safetensors_stream import AS_BYTES, CODES, METADATA, sound_header
from partc.runtime.artifact.tensors.stored_weight import WIDENED, Origin, is_widened, stored_type
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"
_BOX = re.compile(r"\[[\d:, ]*\]$")


@dataclass(frozen=True)
class _StoredShard:
    """A tensor of a weights file: its name there, its shard, type and shape."""

    name: str
    shard: str
    type: str
    shape: object

    @property
    def shards(self) -> tuple[str, ...]:
        """The shards of weights that have these bytes: several for a table and a product in blocks that share them."""
        return self.shard, *self.shard.split("; ")


@dataclass(frozen=True)
class _Weights:
    """The data of a weights file: its begin and end; `tensors` maps begin and end to the tensors there, None if there is no header."""

    begin: int
    end: int
    tensors: dict[tuple[int, int], list[_StoredShard]] | None


def check_weights(
    folder: Path,
    file: str,
    model: ModelProto,
    manifest: Manifest,
    wrong: Collection[str] = (),
    kept: Sequence[StateRecord] = (),
) -> Iterator[Violation]:
    """Yields weights whose bytes are not inside the folder and the file's data, or are another tensor's.

    Files in `wrong` differ from the manifest, which another check reports, and are not read. `kept`: the state of the file's ranks.
    """
    yield from _named_otherwise(file, model, kept)
    opened: dict[str, _Weights | None] = {}
    for tensor in model_tensors(model):
        title = f"weight '{tensor.name}'"
        if tensor.data_location != TensorProto.EXTERNAL:
            known = metadata_of(tensor, DIGEST)
            if known and known != hashlib.sha256(tensor.raw_data).hexdigest()[: len(known)]:
                fact = f"its numbers are not those of '{metadata_of(tensor, PIECE)}', whose hash is stored with it"
                yield Violation(file, fact, title, help=_AGAIN)
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if not stays_inside(location):
            yield Violation(file, f"its data is at '{location}', outside the folder", title)
            continue
        if location not in manifest.files:
            yield Violation(file, f"its data is in '{location}', which the manifest does not list", title)
            continue
        if location in wrong:
            continue
        if location not in opened:
            record = manifest.files[location]
            opened[location] = _Weights(0, record.bytes, None) if record.absent else _open(folder / location, record)
        weights = opened[location]
        if weights is not None:
            offset = _number(entries, "offset")
            yield from _check_region(
                file, title, tensor, location, weights, (offset, offset + _number(entries, "length"))
            )


def _named_otherwise(file: str, model: ModelProto, kept: Sequence[StateRecord]) -> Iterator[Violation]:
    """Yields weights that have another name than the tensor in their metadata; `training/state.py` checks those of the state."""
    state = {record.value for record in kept}
    for tensor in model.graph.initializer:
        text = metadata_of(tensor, PIECE)
        whole = _BOX.sub("", text)
        if text and tensor.name not in (*state, text, whole) and not tensor.name.startswith(f"{whole}@["):
            yield Violation(file, f"its data is that of '{text}'", f"weight '{tensor.name}'", help=_AGAIN)


def _check_region(
    file: str, title: str, tensor: TensorProto, location: str, weights: _Weights, span: tuple[int, int]
) -> Iterator[Violation]:
    offset, end = span
    dtype = stored_type(tensor)
    try:
        origin = Origin.of(tensor)
    except ValueError as error:
        yield Violation(file, f"its data in {location}: {error}", title, help=_AGAIN)
        return
    name, shape = (origin.name, origin.shape) if origin is not None else (tensor.name, tuple(tensor.dims))
    need = None if dtype is None else dtype.bytes_of(shape)
    code = None if dtype is None else CODES.get(dtype.shown)
    if is_widened(tensor) and metadata_of(tensor, STORED) not in WIDENED.get(element(tensor.data_type), ()):
        fact = f"its data is said to be {metadata_of(tensor, STORED)!r}, and it is {element(tensor.data_type)}"
        yield Violation(file, fact, title, help=_AGAIN)
    elif not weights.begin <= offset <= end <= weights.end:
        fact = (
            f"its data would be bytes {offset} to {end} of {location}, whose data is {weights.begin} to {weights.end}"
        )
        yield Violation(file, fact, title)
    elif need is not None and need != end - offset:
        yield Violation(file, f"it has {end - offset} bytes of data, and its type and shape need {need}", title)
    elif weights.tensors is not None:
        there, shard = weights.tensors.get(span, []), metadata_of(tensor, PIECE) if origin is None else ""
        if not there:
            fact = f"no tensor of {location} is at bytes {offset} to {end}"
            yield Violation(file, fact, title, help=_AGAIN)
        elif all(shard not in one.shards if shard and one.shard else name != one.name for one in there):
            named = there[0].shard if origin is None and there[0].shard else there[0].name
            yield Violation(
                file, f"its data is that of '{named}' in {location}; it is '{shard or name}'", title, help=_AGAIN
            )
        elif all(one.type not in (code, AS_BYTES) for one in there):
            fact = f"its data in {location} is {there[0].type}, and it is a {dtype.name if dtype else 'string'}"
            yield Violation(file, fact, title, help=_AGAIN)
        elif all(one.type != AS_BYTES and one.shape != [*shape] for one in there):
            fact = f"its data in {location} is of shape {there[0].shape}, and it is of {[*shape]}"
            yield Violation(file, fact, title, help=_AGAIN)


def _open(path: Path, record: FileRecord) -> _Weights | None:
    """The contents of a weights file; None if the file itself is already reported."""
    try:
        path = Path(record.path or path)
        if not record.sha256 if record.path else path.suffix != ".safetensors":
            return _Weights(0, path.stat().st_size, None)
        text, header = sound_header(path)
        begin, end = len(text), path.stat().st_size
    except (OSError, ValueError):
        return None
    shards = cast(dict[str, str], header.pop(METADATA, {}))
    tensors: dict[tuple[int, int], list[_StoredShard]] = {}
    for name, entry in cast(dict[str, dict[str, Any]], header).items():
        first, last = entry["data_offsets"]
        one = _StoredShard(name, shards.get(name, ""), str(entry.get("dtype", "")), entry.get("shape"))
        tensors.setdefault((begin + first, begin + last), []).append(one)
    return _Weights(begin, end, tensors)


def _number(entries: dict[str, str], key: str) -> int:
    text = entries.get(key, "0")
    return int(text) if text.isdecimal() else -1
