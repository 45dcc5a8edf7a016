"""The safetensors format: tensors streamed into a file one after the other, and mapped from it without a copy.

    8 bytes of little-endian header length | the header in JSON, padded | the tensors without a gap between them

The header stands first, so a file is written from what is known of its tensors before any of them is read: at no time is more
than one in memory. Wider elements come before narrower ones, then names decide: every tensor is aligned to its elements.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from partc.runtime.check_files import data_region
from partc.runtime.dtypes import BY_NAME, Array, Bytes, Dtype
from partc.runtime.format import FileRecord

_CODES = {
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
STORED: Mapping[str, Dtype] = {row.shown: row for row in BY_NAME.values() if row.shown in _CODES}
"""By numpy's name the element types that the format has."""
_DTYPES = {code: STORED[shown] for shown, code in _CODES.items()}
_METADATA = "__metadata__"
_ALIGNMENT = 64
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its element type and shape, and the byte of the file at which it begins."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int = 0


def write_tensors(path: Path, tensors: Mapping[str, Stored], read: Callable[[str], Array]) -> FileRecord:
    """Writes the tensors, which `read` gives by name one at a time, and waits until the disk has them; the file's record."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.bits, name))
    header: dict[str, object] = {}
    end = 0
    for name in names:
        one = tensors[name]
        begin, end = end, end + one.dtype.bytes_of(one.shape)
        header[name] = {"dtype": _CODES[one.dtype.shown], "shape": list(one.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as out:

        def write(data: memoryview) -> None:
            while data:
                written = out.write(data[:_CHUNK])
                digest.update(data[:written])
                data = data[written:]

        write(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            array = read(name)
            assert (array.dtype, array.shape) == (tensors[name].dtype.numpy, tensors[name].shape)
            write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array
        os.fsync(out.fileno())
    return FileRecord(bytes=8 + len(text) + end, sha256=digest.hexdigest())


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name; ValueError where the file is not sound."""
    begin, _ = data_region(path)
    with path.open("rb") as file:
        header = json.loads(file.read(begin)[8:])
    found = {}
    for name, entry in header.items():
        if name == _METADATA:
            continue
        shape, code, (first, last) = entry.get("shape"), entry.get("dtype"), entry["data_offsets"]
        if code not in _DTYPES:
            raise ValueError(f"tensor '{name}' is of type {code!r}; known are {', '.join(_DTYPES)}")
        if not isinstance(shape, list) or any(type(dim) is not int or dim < 0 for dim in shape):
            raise ValueError(f"tensor '{name}' has the shape {shape!r}; whole numbers are needed")
        stored = Stored(_DTYPES[code], tuple(shape), begin + first)
        if (needed := stored.dtype.bytes_of(stored.shape)) != last - first:
            raise ValueError(f"tensor '{name}' has {last - first} bytes; its type and shape need {needed}")
        found[name] = stored
    return found


def mapped(path: Path) -> Bytes:
    """The bytes of a file as they lie there: read only where they are looked at."""
    return np.asarray(np.memmap(path, np.uint8, "r"))


def tensor_in(data: Bytes, stored: Stored) -> Array:
    """A tensor in the bytes of its file, which it shares."""
    size = stored.dtype.bytes_of(stored.shape)
    return data[stored.offset : stored.offset + size].view(stored.dtype.numpy).reshape(stored.shape)
