"""Reads arrays in numpy's format from a file or a member of an .npz: mapped in place or loaded, and always validated.

    read_array(Path("x.npy"))            mapped
    Archive(Path("d.npz"), memory)       arrays by name; those that are stored without compression are mapped

The header states a type and a shape. Before an array is mapped or allocated, these are checked against the number of bytes in the file and,
for arrays that are not mapped, against the memory limit. ValueError, or an error of `BROKEN`, describes the problem.
"""

from __future__ import annotations

import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.errors import reason_of

from ..files.regular import open_regular
from .memory import Memory

BROKEN = (
    *(OSError, ValueError, EOFError, RuntimeError, OverflowError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)
"""The exceptions raised by reading a file that is broken or of another format."""
_MEMBER_HEADER = 30
_CHUNK = 1 << 20
_MOST_EMPTY = 1 << 24
_LONGEST_HEADER = 1 << 16
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def reason(error: BaseException) -> str:
    """Returns a description of a file's problem for the user."""
    text = str(error)
    if "allow_pickle" in text or "Python objects" in text:
        return "it holds Python objects; save arrays of numbers or of text"
    return reason_of(error)


def read_array(path: Path) -> Array:
    """Maps the array of an .npy file."""
    with open_regular(path) as file:
        return _mapped(file, os.fstat(file.fileno()).st_size)


class Archive:
    """The arrays of an .npz by name. `load` returns one; an array that is not mapped is counted in `memory`."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self.path, self.memory = path, memory
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
        self.entries = {entry.filename.removesuffix(".npy"): entry for entry in entries}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def load(self, name: str) -> Array:
        """Returns the array of this name."""
        entry = self.entries[name]
        with open_regular(self.path) as file:
            if entry.compress_type not in _PACKED:  # for LZMA the file determines how much memory is taken
                raise ValueError(f"'{name}' is packed in a way that is not read; save it with np.savez_compressed")
            if entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1:
                return self._stored(file, entry)
            with zipfile.ZipFile(file) as archive, archive.open(entry) as member:
                shape, fortran, dtype, begin = _header(member)
                count = _promised(shape, dtype, entry.file_size - begin)
                self.memory.take(count, f"'{name}'")
                return _filled(member, count, shape, fortran, dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape in the header of an array."""
        with open_regular(self.path) as file, zipfile.ZipFile(file) as archive, archive.open(self.entries[name]) as one:
            return _header(one)[0]

    def _stored(self, file: IO[bytes], entry: zipfile.ZipInfo) -> Array:
        size = os.fstat(file.fileno()).st_size
        file.seek(entry.header_offset)
        header = file.read(_MEMBER_HEADER)
        # the lengths of the member's own name and extra field, which may differ from those in the archive's index
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = entry.header_offset + _MEMBER_HEADER + lengths
        file.seek(begin)
        return _mapped(file, min(size, begin + entry.file_size))


def _mapped(file: IO[bytes], end: int) -> Array:
    """Maps the array that begins at the file's current offset; its bytes must end at or before `end`."""
    shape, fortran, dtype, _ = _header(file)
    begin = file.tell()
    order: Literal["F", "C"] = "F" if fortran else "C"
    if not _promised(shape, dtype, end - begin):
        return cast(Array, np.empty(shape, dtype, order))  # an array without bytes cannot be mapped
    return cast(Array, np.memmap(cast(Any, file), dtype, "r", begin, shape, order))


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads a header; returns the shape, whether the order is Fortran's, the type, and the length of the header in bytes."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in _READERS:
        raise ValueError(f"its format {version[0]}.{version[1]} is not known; save it again with np.save")
    size = file.read(2 * version[0])
    length = int.from_bytes(size, "little")
    if length > _LONGEST_HEADER:  # it is read in one call, and may be a bomb itself
        raise ValueError(f"its header has {length:,} bytes")
    shape, fortran, dtype = _READERS[version](io.BytesIO(size + file.read(length)))
    if dtype.hasobject:
        raise ValueError("it holds Python objects; save arrays of numbers or of text")
    return shape, fortran, dtype, file.tell() - start


def _promised(shape: tuple[int, ...], dtype: np.dtype[Any], have: int) -> int:
    """Returns the number of bytes of the array in a header; ValueError where the file has fewer, or for many records without any bytes."""
    count = math.prod(shape) * dtype.itemsize
    if any(dim < 0 for dim in shape) or (not count and max(shape, default=0) > _MOST_EMPTY):
        raise ValueError(f"its header says {dtype} {list(shape)}")
    if count > have:
        raise ValueError(f"its header promises {dtype} {list(shape)}, {count:,} bytes, and there are {max(0, have):,}")
    return count


def _filled(file: IO[bytes], count: int, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any]) -> Array:
    data = bytearray(count)
    at = 0
    while at < count:
        read = file.read(min(_CHUNK, count - at))
        if not read:
            raise ValueError(f"it ends after {at:,} bytes; its header promises {count:,}")
        data[at : at + len(read)] = read
        at += len(read)
    file.read(1)  # at the end of a member the archive compares checksums
    array = np.frombuffer(data, dtype) if count else np.empty(math.prod(shape), dtype)
    return array.reshape(shape[::-1]).transpose() if fortran else array.reshape(shape)
