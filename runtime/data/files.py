"""Files of records, opened so that a batch reads only its own: mapped into memory where they can be, else loaded once.

    digits.npz              its arrays by name; members stored without compression (np.savez) are mapped, others loaded
    folder/                 of .npy files: `x.npy` is the field x; shards `x_000.npy`, `x_001.npy` are joined to it in order
    x.npy                   one field, mapped
    train-images-idx3-ubyte one field in the IDX format, mapped; .gz is decompressed into memory once
    digits.npz:images       one array of an .npz

A field `ids` with another, `ids.offsets`, is ragged: record i is `ids[offsets[i]:offsets[i + 1]]`.
What is wrong with a file is a UsageError that begins with its path.
"""

from __future__ import annotations

import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np

from ..dtypes import Array
from ..errors import UsageError
from .columns import Column, Joined, RaggedRows, Rows

OFFSETS = ".offsets"
_SHARD = re.compile(r"(.+)_(\d{3,})")
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_HEADER = 4 + 4 * 255
_GZIP = b"\x1f\x8b"
_MEMBER_HEADER = 30


def open_fields(path: Path, apart: Collection[str] = ()) -> dict[str, Column]:
    """All fields of an .npz or of a folder, but for the arrays in `apart`, which hold no records."""
    if path.is_dir():
        return _columns(path, {name: one for name, one in _folder(path).items() if name not in apart})
    _must_exist(path)
    if path.suffix != ".npz":
        raise UsageError(
            f"{path}: it does not name its fields; give an .npz, a folder of .npy files or a .py file, "
            f"or say which input it is: {{x: {path.name}}}"
        )
    with _told(path):
        return _columns(path, {name: [array] for name, array in _archive(path).items() if name not in apart})


def open_value(path: Path, name: str) -> Array | None:
    """The array of a name in an .npz or a folder, or that of an .npy file, whole; None where there is none."""
    with _told(path):
        if path.is_dir():
            file = path / f"{name}.npy"
            return _npy(file) if file.is_file() else None
        _must_exist(path)
        return _archive(path).get(name) if path.suffix == ".npz" else _npy(path)


def open_field(name: str, path: Path, offsets: Path | None = None) -> Column:
    """The field that a file, or `file.npz:member`, gives to an input of this name; ragged where it has offsets."""
    if offsets is not None:
        return _ragged(path, open_field(name, path), open_field(name + OFFSETS, offsets))
    file, colon, member = str(path).rpartition(":")
    if colon and not path.exists() and file.endswith(".npz"):
        return _member(Path(file), member)
    if path.is_dir():
        return _only(path, _columns(path, _folder(path)), name)
    _must_exist(path)
    if path.suffix == ".npz":
        return _only(path, open_fields(path), name)
    with _told(path):
        return Rows(_npy(path) if path.suffix == ".npy" else _idx(path))


def _ragged(path: Path, flat: Column, offsets: Column) -> Column:
    if not isinstance(flat, Rows) or not isinstance(offsets, Rows):
        raise UsageError(f"{path}: of a field with offsets both must be one array")
    with _told(path):
        return RaggedRows(flat, offsets.take(np.arange(len(offsets))))


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file or folder")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        text = str(error)
        if "allow_pickle" in text or "Python objects" in text:
            text = "it holds Python objects; save arrays of numbers or of text"
        raise UsageError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _member(path: Path, member: str) -> Column:
    found = open_fields(path)
    if member not in found:
        raise UsageError(f"{path}: it has no array '{member}'; its arrays are {_listed(found)}")
    return found[member]


def _only(path: Path, found: Mapping[str, Column], name: str) -> Column:
    if name in found:
        return found[name]
    if len(found) != 1:
        raise UsageError(f"{path}: it has no '{name}', and not one array alone: {_listed(found)}")
    return next(iter(found.values()))


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def _folder(path: Path) -> dict[str, list[Array]]:
    """The arrays of each field of a folder, shards in order."""
    files = {file.stem: file for file in sorted(path.glob("*.npy"))}
    if not files:
        raise UsageError(f"{path}: there are no .npy files in this folder")
    shards: dict[str, dict[int, str]] = {}
    for stem in files:
        if match := _SHARD.fullmatch(stem):
            shards.setdefault(match[1], {})[int(match[2])] = stem
    found: dict[str, list[str]] = {stem: [stem] for stem in files if not _SHARD.fullmatch(stem)}
    for name, numbered in shards.items():
        if name in found:
            raise UsageError(
                f"{path}: there is '{name}.npy' and there are shards of it, '{min(numbered.values())}.npy'"
            )
        missing = sorted(set(range(min(numbered), max(numbered))) - set(numbered))
        if missing or min(numbered) > 1:
            raise UsageError(
                f"{path}: of the shards of '{name}' number {missing[0] if missing else 0} is missing; "
                f"there are {len(numbered)}, up to {max(numbered)}"
            )
        found[name] = [numbered[number] for number in sorted(numbered)]
    with _told(path):
        return {name: [_npy(files[stem]) for stem in stems] for name, stems in found.items()}


def _columns(path: Path, arrays: Mapping[str, list[Array]]) -> dict[str, Column]:
    """Columns of arrays: shards joined, offsets made part of the fields that they cut."""
    found: dict[str, Column] = {}
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
                found[name] = RaggedRows(rows[0], arrays[name + OFFSETS][0])
            else:
                found[name] = rows[0] if len(rows) == 1 else Joined(rows)
        except ValueError as error:
            raise UsageError(f"{path}: '{name}': {error}") from None
    return found


def _npy(path: Path) -> Array:
    try:
        return cast(Array, np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        if "mmap" not in str(error) and "empty" not in str(error):
            raise
    return cast(Array, np.load(path, allow_pickle=False))  # what has no bytes cannot be mapped


def _archive(path: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as loaded:
        for entry in (one for one in archive.infolist() if one.filename.endswith(".npy")):
            name = entry.filename.removesuffix(".npy")
            mapped = _mapped(path, entry) if entry.compress_type == zipfile.ZIP_STORED else None
            found[name] = loaded[name] if mapped is None else mapped
    return found


def _mapped(path: Path, entry: zipfile.ZipInfo) -> Array | None:
    """A member that is stored as it is, mapped; None where numpy must load it."""
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(_MEMBER_HEADER)
        # its own name and extra field, whose lengths may differ from those in the archive's index
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        file.seek(entry.header_offset + _MEMBER_HEADER + lengths)
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return None
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        begin = file.tell()
    if dtype.hasobject or not math.prod(shape) or not dtype.itemsize:
        return None
    return np.memmap(path, dtype, "r", begin, shape, "F" if fortran else "C")


def _idx(path: Path) -> Array:
    """An array in the IDX format: two zero bytes, a type, the number of dims, each dim in four bytes, then the elements."""
    content = None
    with open(path, "rb") as file:
        head, size = file.read(_IDX_HEADER), path.stat().st_size
    if head.startswith(_GZIP):
        content = gzip.decompress(path.read_bytes())
        head, size = content[:_IDX_HEADER], len(content)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not head[3]:
        raise ValueError("it is no .npy, .npz or IDX file")
    begin = 4 + 4 * head[3]
    dtype = np.dtype(_IDX_TYPES[head[2]])
    shape = tuple(int(dim) for dim in np.frombuffer(head, ">u4", count=head[3], offset=4))
    wanted = begin + math.prod(shape) * dtype.itemsize
    if size != wanted:
        raise ValueError(f"it has {size} bytes, its header promises {wanted}")
    if content is not None:
        return np.frombuffer(content, dtype, offset=begin).reshape(shape)
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", begin, shape)
