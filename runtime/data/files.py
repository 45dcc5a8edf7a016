"""Opens files of records so that a batch reads only its own records: files are mapped into memory if possible, else loaded once.

    digits.npz              its arrays by name; members stored without compression (np.savez) are mapped, others loaded
    folder/                 of .npy files: `x.npy` is the field x; shards `x_000.npy`, `x_001.npy` are joined to it in order
    x.npy                   one field, mapped
    train-images-idx3-ubyte one field in the IDX format, mapped; .gz is decompressed into memory once
    digits.npz:images       one array of an .npz

A field `ids` is ragged if there is also a field `ids.offsets`: record i is `ids[offsets[i]:offsets[i + 1]]`. A problem with a file is a
UsageError that begins with its path.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..errors import UsageError
from ..files.regular import fault, open_regular
from .fields import Column, Joined, RaggedRows, Rows
from .memory import Memory
from .npy import BROKEN, Archive, read_array, reason

OFFSETS = ".offsets"
_SHARD = re.compile(r"(.+)_(\d{3,})")
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_HEAD = 4
_GZIP = b"\x1f\x8b"


def open_fields(path: Path, apart: Collection[str] = (), memory: Memory | None = None) -> dict[str, Column]:
    """Opens all fields of an .npz or of a folder, except the arrays in `apart`, which are not records.

    Arrays that are not mapped are counted in `memory`; UsageError where they exceed its limit.
    """
    if path.is_dir():
        return _columns(path, {name: one for name, one in _folder(path).items() if name not in apart})
    _must_exist(path)
    if path.suffix != ".npz":
        raise UsageError(
            f"{path}: it does not name its fields; give an .npz, a folder of .npy files or a .py file, "
            f"or say which input it is: {{x: {path.name}}}"
        )
    with _reading(path):
        archive = Archive(path, memory or Memory())
        return _columns(path, {name: [archive.load(name)] for name in archive if name not in apart})


def open_value(path: Path, name: str, memory: Memory | None = None) -> Array | None:
    """Returns the named array in an .npz or a folder, or the array of an .npy file, in full; None where there is none."""
    with _reading(path):
        if path.is_dir():
            file = path / f"{name}.npy"
            return read_array(file) if os.path.lexists(file) else None
        _must_exist(path)
        if path.suffix != ".npz":
            return read_array(path)
        archive = Archive(path, memory or Memory())
        return archive.load(name) if name in archive else None


def open_field(name: str, path: Path, offsets: Path | None = None, memory: Memory | None = None) -> Column:
    """Opens the field in a file, or in `file.npz:member`, for an input of this name; it is ragged where `offsets` is given."""
    memory = memory or Memory()
    if offsets is not None:
        flat, ends = open_field(name, path, None, memory), open_field(name + OFFSETS, offsets, None, memory)
        if not isinstance(flat, Rows) or not isinstance(ends, Rows):
            raise UsageError(f"{path}: of a field with offsets both must be one array")
        with _reading(path):
            return RaggedRows(flat, ends.take(np.arange(len(ends))))
    file, colon, member = str(path).rpartition(":")
    if colon and not path.exists() and file.endswith(".npz"):
        return _member(Path(file), member, memory)
    if path.is_dir():
        return _only(path, _columns(path, _folder(path)), name)
    _must_exist(path)
    if path.suffix == ".npz":
        with _reading(path):
            archive = Archive(path, memory)
        return _of_archive(path, archive, name) if name in archive else _only(path, open_fields(path, (), memory), name)
    with _reading(path):
        return Rows(read_array(path) if path.suffix == ".npy" else _idx(path, memory))


def _must_exist(path: Path) -> None:
    if why := fault(path):
        raise UsageError(f"{path}: {why.replace('such file', 'such file or folder')}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except BROKEN as error:
        text = reason(error)
        raise UsageError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _member(path: Path, member: str, memory: Memory) -> Column:
    _must_exist(path)
    with _reading(path):
        archive = Archive(path, memory)
    if member not in archive:
        raise UsageError(f"{path}: it has no array '{member}'; its arrays are {_listed(archive.entries)}")
    return _of_archive(path, archive, member)


def _of_archive(path: Path, archive: Archive, name: str) -> Column:
    """Opens one field of an archive, ragged where the archive has its offsets."""
    with _reading(path):
        wanted = [one for one in (name, name + OFFSETS) if one in archive]
        return _columns(path, {one: [archive.load(one)] for one in wanted})[name]


def _only(path: Path, found: Mapping[str, Column], name: str) -> Column:
    if name in found:
        return found[name]
    if len(found) != 1:
        raise UsageError(f"{path}: it has no '{name}', and not one array alone: {_listed(found)}")
    return next(iter(found.values()))


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def _folder(path: Path) -> dict[str, list[Array]]:
    """Maps each field of a folder to its arrays, shards in order."""
    files = {file.stem: file for file in sorted(path.glob("*.npy"))}
    if not files:
        raise UsageError(f"{path}: there are no .npy files in this folder")
    shards: dict[str, dict[int, str]] = {}
    for stem in files:
        if match := _SHARD.fullmatch(stem):
            shards.setdefault(match[1], {})[int(match[2])] = stem
    stems_of: dict[str, list[str]] = {stem: [stem] for stem in files if not _SHARD.fullmatch(stem)}
    for name, numbered in shards.items():
        if name in stems_of:
            raise UsageError(
                f"{path}: there is '{name}.npy' and there are shards of it, '{min(numbered.values())}.npy'"
            )
        missing = sorted(set(range(min(numbered), max(numbered))) - set(numbered))
        if missing or min(numbered) > 1:
            raise UsageError(
                f"{path}: of the shards of '{name}' number {missing[0] if missing else 0} is missing; "
                f"there are {len(numbered)}, up to {max(numbered)}"
            )
        stems_of[name] = [numbered[number] for number in sorted(numbered)]
    with _reading(path):
        return {name: [read_array(files[stem]) for stem in stems] for name, stems in stems_of.items()}


def _columns(path: Path, arrays: Mapping[str, list[Array]]) -> dict[str, Column]:
    """Returns the columns of arrays: shards are joined, and fields with offsets become ragged."""
    columns: dict[str, Column] = {}
    for name, parts in arrays.items():
        if name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in arrays:
            continue
        try:
            rows = [Rows(part) for part in parts]
            odd = next((one for one in rows if one.field != rows[0].field), None)
            if odd:
                raise ValueError(f"its shards differ: one has {rows[0].field}, another {odd.field}")
            if name + OFFSETS in arrays:
                if len(rows) > 1:
                    raise ValueError("it has offsets and several shards; give it as one file")
                columns[name] = RaggedRows(rows[0], arrays[name + OFFSETS][0])
            else:
                columns[name] = rows[0] if len(rows) == 1 else Joined(rows)
        except ValueError as error:
            raise UsageError(f"{path}: '{name}': {error}") from None
    return columns


def _idx(path: Path, memory: Memory) -> Array:
    """Reads an array in the IDX format: two zero bytes, a type, the number of dims, each dim in four bytes, then the elements."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        with gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file) as content:
            head = content.read(_IDX_HEAD)
            head += content.read(4 * head[3]) if len(head) == _IDX_HEAD else b""
            if len(head) < _IDX_HEAD or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not head[3]:
                raise ValueError("it is not a .npy, .npz or IDX file")
            begin = _IDX_HEAD + 4 * head[3]
            dtype = np.dtype(_IDX_TYPES[head[2]])
            shape = tuple(int(dim) for dim in np.frombuffer(head, ">u4", count=head[3], offset=_IDX_HEAD))
            count = math.prod(shape) * dtype.itemsize
            if not packed:
                return _mapped_idx(file, size, begin, shape, dtype)
            memory.take(count, "decompressed it")
            data = content.read(count)
            if len(data) != count or content.read(1):
                have = f"{begin + len(data)} bytes" if len(data) < count else "more"
                raise ValueError(f"it has {have}, its header promises {begin + count}")
    return np.frombuffer(data, dtype).reshape(shape)


def _mapped_idx(file: BinaryIO, size: int, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    wanted = begin + math.prod(shape) * dtype.itemsize
    if size != wanted:
        raise ValueError(f"it has {size} bytes, its header promises {wanted}")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(cast(Any, file), dtype, "r", begin, shape)
