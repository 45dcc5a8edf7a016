"""Proves a checkpoint whole: every file as it was written, every piece where the index says, every element exactly once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .checkpoint import Checkpoint
from .checkpoint_box import common, left_of, whole
from .checkpoint_file import Stored, read_header
from .checkpoint_index import INDEX, CheckpointError, CheckpointIndex, TensorRecord, read_index


def verify(folder: Path) -> list[str]:
    """All that is wrong with the checkpoint in a folder, a line each; empty where it is whole."""
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return [line for line in str(error).splitlines() if not line.startswith("  help: ")]
    checkpoint = Checkpoint(folder, index)
    problems = checkpoint.missing_files()
    if not problems:
        problems = checkpoint.changed_files()
    headers: dict[str, dict[str, Stored]] = {}
    for name in index.files:
        try:
            headers[name] = read_header(folder / name)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            problems.append(f"{folder / name}: {error}")
    problems += _pieces(folder, index, headers)
    for name, tensor in index.tensors.items():
        problems += (f"{folder / INDEX}: '{name}': {problem}" for problem in _coverage(tensor))
    return [*problems, *_strangers(folder, index)]


def _pieces(folder: Path, index: CheckpointIndex, headers: dict[str, dict[str, Stored]]) -> Iterator[str]:
    listed: dict[str, set[str]] = {name: set() for name in headers}
    for name, tensor in index.tensors.items():
        for piece in tensor.pieces:
            if piece.file not in headers:
                continue
            where = f"{folder / piece.file}: '{piece.key}' of '{name}'"
            stored = headers[piece.file].get(piece.key)
            if piece.key in listed[piece.file]:
                yield f"{where}: stands in the index twice"
            listed[piece.file].add(piece.key)
            if stored is None:
                yield f"{where}: is not there"
            elif (stored.dtype.shown, stored.shape) != (tensor.dtype, piece.box.shape):
                have, wanted = f"{stored.dtype.shown} {list(stored.shape)}", f"{tensor.dtype} {list(piece.box.shape)}"
                yield f"{where}: is {have}; the index says {wanted}"
    for name, keys in listed.items():
        yield from (f"{folder / name}: '{key}' is not in the index" for key in headers[name] if key not in keys)


def _coverage(tensor: TensorRecord) -> Iterator[str]:
    every = whole(tensor.shape)
    boxes = [piece.box for piece in tensor.pieces]
    missing = left_of([every], boxes) if every.count else []
    absent = sum(box.count for box in missing)
    twice = sum(box.count for box in boxes) - (every.count - absent)
    if absent:
        yield f"{absent} of its {every.count} elements are in no piece, the first at {missing[0]}"
    if twice:
        pairs = ((one, other) for at, one in enumerate(boxes) for other in boxes[:at])
        first = next(shared for one, other in pairs if (shared := common(other, one)) is not None)
        yield f"{twice} of its {every.count} elements are in more than one piece, the first at {first}"


def _strangers(folder: Path, index: CheckpointIndex) -> Iterator[str]:
    known = {*index.files, INDEX}
    for root, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            path = Path(root) / file
            if path.relative_to(folder).as_posix() not in known:
                yield f"{path}: is not in the index"
