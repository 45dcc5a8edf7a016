"""The header of a safetensors file, and what makes it sound.

8 bytes of little-endian header length | the header in JSON, padded | the tensors without a gap between them
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from ..files.regular import open_regular

_HEADER_BYTES = 100_000_000
"""The safetensors format allows no more."""


def sound_header(path: Path) -> tuple[bytes, dict[str, object]]:
    """The bytes before a safetensors file's data, and the header that they hold; ValueError where it is not sound.

    The law: 8 bytes of little-endian header length, the header in JSON, then the tensors without a gap between them.
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
    names = header.get("__metadata__", {})
    if not isinstance(names, dict) or not all(isinstance(text, str) for text in names.values()):
        raise ValueError("its '__metadata__' is no mapping of texts")
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
        if name == "__metadata__":
            continue
        span = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)):
            raise ValueError(f"tensor {name!r} has no data_offsets")
        first, last = cast(list[int], span)
        yield first, last, name
