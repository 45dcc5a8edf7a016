"""Checks an artifact's folder against its manifest: schema, sizes, hashes, strangers, and the weights files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from partc.runtime.artifact.format import MANIFEST, FileRecord, Manifest
from partc.runtime.artifact.manifest import open_artifact, sha256
from partc.runtime.checker.violation import Violation
from partc.runtime.errors import ArtifactError
from partc.runtime.files.regular import fault, open_regular

_HEADER_BYTES = 100_000_000
"""The safetensors format allows no more."""
_COMPILE_AGAIN = "compile the model again, or copy the whole folder again"


def read_manifest(folder: Path) -> tuple[Manifest | None, list[Violation]]:
    """The manifest of `folder`, or None with the reasons why there is none that this version reads."""
    try:
        return open_artifact(folder, trust=True).manifest, []
    except ArtifactError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        help = next((line.removeprefix("help: ") for line in lines if line.startswith("help: ")), "")
        facts = (line.split(": ", 1) for line in lines if not line.startswith("help: "))
        return None, [Violation(fact[0], fact[-1], help=help) for fact in facts]


def check_folder(folder: Path, manifest: Manifest) -> list[Violation]:
    """What differs between the folder's files and the manifest's list of them; a file that is not the manifest's is not read further."""
    found = list(missing_programs(manifest))
    for name, record in sorted(manifest.files.items()):
        found.extend(_check_file(folder, name, record))
    return [*found, *_strangers(folder, manifest)]


def missing_programs(manifest: Manifest) -> Iterator[Violation]:
    """A violation for the first rank without a program; the others without one are not listed."""
    if manifest.programs and len(manifest.programs) != manifest.ranks:
        yield Violation(MANIFEST, f"it names {len(manifest.programs)} programs for {manifest.ranks} ranks")
        return
    for rank in range(manifest.ranks):
        if manifest.program(rank) not in manifest.files:
            yield Violation(MANIFEST, f"it lists no file {manifest.program(rank)} for rank {rank} of {manifest.ranks}")
            return


def _check_file(folder: Path, name: str, record: FileRecord) -> Iterator[Violation]:
    path = folder / name
    if not path.exists():
        yield Violation(name, "the manifest lists it, and it is not there", help=_COMPILE_AGAIN)
        return
    if why := fault(path):
        yield Violation(name, f"it {why}", help=_COMPILE_AGAIN)
        return
    if not path.resolve().is_relative_to(folder.resolve()):
        yield Violation(name, f"it leads out of the folder, to {path.resolve()}", help="put the file itself there")
        return
    size = path.stat().st_size
    if size != record.bytes:
        yield Violation(name, f"it has {size} bytes; the manifest says {record.bytes}", help=_COMPILE_AGAIN)
    elif (digest := sha256(path)) != record.sha256:
        fact = f"its content has changed: sha256 {digest[:12]}…, the manifest says {record.sha256[:12]}…"
        yield Violation(name, fact, help=_COMPILE_AGAIN)
    elif name.endswith(".safetensors"):
        try:
            data_region(path)
        except ValueError as error:
            yield Violation(name, str(error), help=_COMPILE_AGAIN)


def _strangers(folder: Path, manifest: Manifest) -> Iterator[Violation]:
    known = {*manifest.files, MANIFEST}
    for root, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            name = (Path(root) / file).relative_to(folder).as_posix()
            if name not in known:
                yield Violation(name, "the manifest does not list it", help="remove it from the folder")


def data_region(path: Path) -> tuple[int, int]:
    """First and one-past-last byte of a safetensors file's data; ValueError where the header is not sound."""
    text, _ = sound_header(path)
    return len(text), path.stat().st_size


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
