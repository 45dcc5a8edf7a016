"""Bombs in files of numbers: headers of arrays and of tensors that lie, and archives that expand."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Mapping

import numpy as np

Bomb = Callable[[random.Random], bytes]
HUGE = 10**12


def npy(shape: str, descr: str = "<f4", content: bytes = b"") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def zipped(content: bytes, name: str = "x.npy", how: int = zipfile.ZIP_DEFLATED, count: int = 1) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as archive:
        for k in range(count):
            archive.writestr(name if count == 1 else f"{k}.npy", content)
    return made.getvalue()


def idx(dims: int, size: int) -> bytes:
    return b"\0\0\x08" + bytes([dims]) + struct.pack(f">{dims}I", *[size] * dims)


def header(entries: object, length: int | None = None, content: bytes = b"") -> bytes:
    """A file of tensors."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def tensor(shape: list[int], first: int, last: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


HEADERS: Mapping[str, Bomb] = {
    "a header longer than the file": lambda chance: header({}, chance.choice([1 << 20, 1 << 40, (1 << 64) - 1])),
    "a deep header": lambda chance: header(b"[" * chance.choice([1000, 1_000_000])),
    "many tensors": lambda chance: header({f"t{k}": tensor([0], 0, 0) for k in range(200_000)}),
    "a huge shape": lambda chance: header({"t": tensor([HUGE, HUGE], 0, 4)}, None, bytes(4)),
    "many dims": lambda chance: header({"t": tensor([1] * 1_000_000, 0, 4)}, None, bytes(4)),
    "offsets outside": lambda chance: header({"t": tensor([1], 0, HUGE)}, None, bytes(4)),
    "offsets that overlap": lambda chance: header({"t": tensor([1], 0, 4), "u": tensor([1], 0, 4)}, None, bytes(4)),
    "a number of many digits": lambda chance: header(b'{"t": {"dtype": "F32", "shape": [%s]}}' % (b"9" * 100_000)),
    "nothing": lambda chance: b"",
    "seven bytes": lambda chance: bytes(7),
    "not UTF-8": lambda chance: header(b"\xff" * 40),
}

ARRAYS: Mapping[str, Bomb] = {
    "a huge shape": lambda chance: npy(f"({HUGE}, 4)", content=bytes(64)),
    "a shape of nothing": lambda chance: npy(f"({HUGE}, 0)"),
    "a negative shape": lambda chance: npy("(-4, 4)"),
    "many dims": lambda chance: npy(f"({'1,' * 5000})"),
    "a long header": lambda chance: b"\x93NUMPY\x02\x00" + struct.pack("<I", (1 << 32) - 1) + b" " * 100_000,
    "a deep header": lambda chance: npy("(" * 5000),
    "objects": lambda chance: npy("(4,)", "|O", bytes(64)),
    "cut short": lambda chance: npy("(4, 6)", content=bytes(90)),
    "an archive of a huge shape": lambda chance: zipped(npy(f"({HUGE},)")),
    "an archive that expands": lambda chance: zipped(npy("(100000000,)", content=bytes(300_000_000))),
    "an archive of many": lambda chance: zipped(npy("(4,)", content=bytes(16)), count=20_000),
    "an archive packed by LZMA": lambda chance: zipped(npy("(4,)", content=bytes(16)), how=zipfile.ZIP_LZMA),
    "an archive cut short": lambda chance: zipped(npy("(4, 6)", content=bytes(96)))[:-20],
    "a name with a folder": lambda chance: zipped(npy("(4, 6)", content=bytes(96)), "../x.npy"),
    "IDX of many dims": lambda chance: idx(255, chance.choice([2, 1 << 31])),
    "IDX cut short": lambda chance: idx(3, 1000),
    "IDX packed": lambda chance: gzip.compress(idx(2, 60_000) + bytes(1_000_000)),
    "packed in much": lambda chance: gzip.compress(idx(1, 400_000_000) + bytes(200_000_000), 1),
    "nothing": lambda chance: b"",
    "chance": lambda chance: chance.randbytes(4096),
    "of another model": lambda chance: npy("(4, 1000)", content=np.ones(4000, np.float32).tobytes()),
}
