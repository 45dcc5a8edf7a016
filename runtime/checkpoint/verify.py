"""Verifies a checkpoint's integrity: files are unchanged, shards are where the index says, and each element is stored exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partc.runtime.artifact.tensors.safetensors_stream import Stored, read_header

from ..errors import CheckpointError, printable, reason_of
from ..files.regular import unlisted
from .checkpoint import Checkpoint
from .index import INDEX, CheckpointIndex, read_index
from .verification import Verification


def verify(folder: Path) -> list[str]:
    """Returns a line for each problem of the checkpoint in a folder; an empty list where it is intact."""
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return [line for line in str(error).splitlines() if not line.startswith("  help: ")]
    checkpoint = Checkpoint(folder, index)
    problems = checkpoint.missing_files()
    headers: dict[str, dict[str, Stored]] = {}
    if not problems:
        for name, record in index.files.items():
            try:
                headers[name] = read_header(folder / name, record.header)
            except (OSError, ValueError) as error:
                problems.append(f"{folder / name}: {reason_of(error)}")
    if not problems:
        with Verification(checkpoint, thorough=True) as proof:
            problems = proof.problems()
    problems += _shards(folder, index, headers)
    others = unlisted(folder, {*index.files, INDEX})
    return [*problems, *(printable(f"{folder / name}: is not in the index") for name in others)]


def _shards(folder: Path, index: CheckpointIndex, headers: dict[str, dict[str, Stored]]) -> Iterator[str]:
    listed: dict[str, set[str]] = {name: set() for name in headers}
    for name, tensor in index.tensors.items():
        for piece in tensor.pieces:
            if piece.file not in headers:
                continue
            where = f"{folder / piece.file}: '{piece.key}' of '{name}'"
            stored = headers[piece.file].get(piece.key)
            if piece.key in listed[piece.file]:
                yield f"{where}: is in the index twice"
            listed[piece.file].add(piece.key)
            if stored is None:
                yield f"{where}: is not there"
            elif (stored.dtype.shown, stored.shape) != (tensor.dtype, piece.region.shape):
                have, wanted = (
                    f"{stored.dtype.shown} {list(stored.shape)}",
                    f"{tensor.dtype} {list(piece.region.shape)}",
                )
                yield f"{where}: is {have}; the index says {wanted}"
    for name, keys in listed.items():
        yield from (f"{folder / name}: '{key}' is not in the index" for key in headers[name] if key not in keys)
