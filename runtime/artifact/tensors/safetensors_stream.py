"""The safetensors format: headers, tensors streamed into a file one after the other, and tensors mapped from a file without a copy.

    8 bytes of little-endian header length | the header in JSON, padded | the tensors without a gap between them

The header comes first and needs only the tensors' types and shapes, so it is written before any tensor is read, and at most one tensor is
in memory at a time. Tensors are sorted by the width of their elements, the widest first, then by name, so each is aligned to its
elements.

The metadata of a file that is written here map each tensor's name to its checksums: the CRC-32 and the SHA-256 of each `PART` bytes. The
length of the checksums is known in advance, so they are filled in last. The header's own SHA-256 therefore vouches for every tensor, and
any part of a file can be checked alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard, cast

import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_NAME, Array, Bytes, Dtype
from partc.runtime.files.regular import open_regular
from partc.runtime.files.writers import new_raw_file

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Maps numpy's name of an element type to its name in the format."""
AS_BYTES = "U8"
"""The format's type for tensors whose own type the format lacks: they are stored as bytes."""
STORED: Mapping[str, Dtype] = {row.shown: row for row in BY_NAME.values() if row.shown in CODES}
"""Maps numpy's names to the element types of the format."""
_DTYPES = {code: STORED[shown] for shown, code in CODES.items()}
METADATA = "__metadata__"
_HEADER_BYTES = 100_000_000
"""The most header bytes that the safetensors format allows."""
_ALIGNMENT = 64
_CHUNK = 1 << 20
PART = 1 << 24
"""The bytes that have checksums of their own, so that several threads or ranks can divide the work on a large tensor."""
_CRC_DIGITS = 8
_DIGITS = _CRC_DIGITS + 64
_DIMS = 64
_ELEMENTS = 1 << 56
_HEXADECIMAL = re.compile("[0-9a-f]*")


@dataclass(frozen=True)
class Sums:
    """Checksums of written bytes: `crc32` detects damage at a third of the cost, `sha256` also forgery."""

    crc32: str
    sha256: str


class RunningSums:
    """The checksums of bytes while they are written."""

    def __init__(self, begin: bytes = b"") -> None:
        self._sha256, self._crc32 = hashlib.sha256(begin), zlib.crc32(begin)

    def update(self, data: memoryview) -> None:
        """Adds the next bytes."""
        self._sha256.update(data)
        self._crc32 = zlib.crc32(data, self._crc32)

    def sums(self) -> Sums:
        """The checksums of all bytes so far."""
        return Sums(f"{self._crc32:0{_CRC_DIGITS}x}", self._sha256.hexdigest())


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its element type and shape, the offset in the file at which it begins, and its parts' checksums, if known."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int = 0
    sums: tuple[Sums, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.dtype.bytes_of(self.shape)


@dataclass(frozen=True)
class StreamEntry:
    """The result of writing a file: its size, and the SHA-256 of its header, which has the checksums of its tensors."""

    bytes: int
    header: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, Stored],
    read: Callable[[str], Iterable[Array]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> StreamEntry:
    """Writes a new file of tensors, and waits until it is on the disk.

    `read` returns the tensor of a name as blocks of its elements in order, and is called for one tensor at a time. The header has the
    `metadata` as well as the checksums. An OSError names the file.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.bits, name))
    rows = [(name, CODES[one.dtype.shown], one.shape, one.bytes) for name in names for one in (tensors[name],)]
    sums = {**metadata} | {name: "0" * (_DIGITS * _block_count(tensors[name].bytes)) for name in names}
    text = header_bytes(rows, sums)
    try:
        with new_raw_file(path) as out:
            _write(out, [memoryview(text)])
            for name in names:
                sums[name] = _write(out, _bytes(read(name), tensors[name]))
            size = out.tell()
            out.seek(0)
            text = header_bytes(rows, sums)
            _write(out, [memoryview(text)])
            os.fsync(out.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return StreamEntry(size, hashlib.sha256(text).hexdigest())


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str], alignment: int = _ALIGNMENT
) -> bytes:
    """Returns the bytes before the tensors, which follow in the order of `tensors`: name, code, shape and number of bytes of each.

    The first tensor begins at a multiple of `alignment`.
    """
    header: dict[str, object] = {METADATA: metadata}
    end = 0
    for name, code, shape, size in tensors:
        begin, end = end, end + size
        header[name] = {"dtype": code, "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def _block_count(size: int) -> int:
    return -(-size // PART)


def _bytes(blocks: Iterable[Array], stored: Stored) -> Iterator[memoryview]:
    """Yields the bytes of a tensor's blocks; they must have the tensor's dtype and number of elements."""
    count = 0
    for block in blocks:
        assert block.dtype == stored.dtype.numpy
        count += block.size
        yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    assert count == math.prod(stored.shape)


def _write(out: FileIO, blocks: Iterable[memoryview]) -> str:
    """Writes all blocks; returns the checksums of their parts, concatenated."""
    parts, left = list[RunningSums](), 0
    for block in blocks:
        rest = block
        while rest:
            if not left:
                parts.append(RunningSums())
                left = PART
            written = out.write(rest[: min(left, _CHUNK)])
            parts[-1].update(rest[:written])
            rest, left = rest[written:], left - written
    return "".join(f"{one.crc32}{one.sha256}" for one in (part.sums() for part in parts))


def read_header(path: Path, sha256: str = "") -> dict[str, Stored]:
    """Maps the name of each tensor in a file to its `Stored`; ValueError if the file is not valid or `sha256` is not that of its header."""
    text, header = sound_header(path)
    if sha256 and (found := hashlib.sha256(text).hexdigest()) != sha256:
        raise ValueError(
            f"its header is not the one that was written: its SHA-256 begins with {found[:12]}, that was {sha256[:12]}"
        )
    metadata = header.pop(METADATA, None)
    sums = metadata if isinstance(metadata, dict) else {}
    found_tensors = {}
    for name, entry in header.items():
        assert isinstance(entry, dict)
        shape, code, (first, last) = entry.get("shape"), entry.get("dtype"), entry["data_offsets"]
        if not isinstance(code, str) or code not in _DTYPES:
            raise ValueError(f"tensor {name!r} is of type {code!r}; known are {', '.join(_DTYPES)}")
        if not is_shape(shape):
            raise ValueError(f"tensor {name!r} has no shape of at most {_DIMS} whole numbers")
        stored = Stored(_DTYPES[code], tuple(shape), len(text) + first, _sums(sums.get(name), last - first))
        if (needed := stored.bytes) != last - first:
            raise ValueError(f"tensor {name!r} has {last - first} bytes; its type and shape need {needed}")
        found_tensors[name] = stored
    return found_tensors


def sound_header(path: Path) -> tuple[bytes, dict[str, object]]:
    """Returns the bytes before a safetensors file's data, and the header parsed from them; ValueError where the file is not valid.

    A valid file has 8 bytes of little-endian header length, the header in JSON, then the tensors without a gap between them.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"its header would end at byte {8 + length}, and the file has {size}")
        if length > _HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes; at most {_HEADER_BYTES} are read")
        text = first + file.read(length)
    try:
        header = json.loads(text[8:])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header holds no JSON object")
    names = header.get(METADATA, {})
    if not isinstance(names, dict) or not all(isinstance(text, str) for text in names.values()):
        raise ValueError(f"its '{METADATA}' is not a mapping of texts")
    end = 0
    for begin, last, name in sorted(_spans(header)):
        if begin != end or last < begin:
            raise ValueError(f"tensor {name!r} lies at {begin} to {last}; the one before it ends at {end}")
        end = last
    if len(text) + end != size:
        raise ValueError(f"its tensors end at byte {len(text) + end}, and the file has {size}")
    return text, header


def _spans(header: dict[str, object]) -> Iterator[tuple[int, int, str]]:
    for name, entry in header.items():
        if name == METADATA:
            continue
        span = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)):
            raise ValueError(f"tensor {name!r} has no data_offsets")
        first, last = cast(list[int], span)
        yield first, last, name


def is_shape(shape: object) -> TypeGuard[list[int]]:
    """Whether an object of JSON is a valid shape."""
    if not isinstance(shape, list) or len(shape) > _DIMS or any(type(dim) is not int or dim < 0 for dim in shape):
        return False
    return bool(math.prod(max(dim, 1) for dim in shape) < _ELEMENTS)


def _sums(text: object, size: int) -> tuple[Sums, ...]:
    """The checksums of a tensor's parts; empty where the text is not checksums, since another tool may have written it."""
    if not isinstance(text, str) or len(text) != _DIGITS * _block_count(size) or not _HEXADECIMAL.fullmatch(text):
        return ()
    parts = (text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS))
    return tuple(Sums(part[:_CRC_DIGITS], part[_CRC_DIGITS:]) for part in parts)


@dataclass(frozen=True)
class MappedFile:
    """The bytes of a file, mapped into memory: a page is read when it is accessed."""

    data: Bytes
    pages: mmap.mmap

    @staticmethod
    def of(path: Path) -> MappedFile:
        """Maps a file; ValueError where it is empty."""
        with open_regular(path) as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return MappedFile(np.frombuffer(pages, np.uint8), pages)

    def forget(self) -> None:
        """Frees the memory of pages that were accessed; the next access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)


def tensor_in(data: Bytes, stored: Stored) -> Array:
    """Returns a tensor as a view of its file's bytes."""
    return data[stored.offset : stored.offset + stored.bytes].view(stored.dtype.numpy).reshape(stored.shape)
