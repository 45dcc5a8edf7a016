"""Checks an artifact's folder against its manifest: schema, sizes, hashes, unlisted files, and the weights files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from partc.runtime.artifact.format import MANIFEST, FileRecord, Manifest
from partc.runtime.artifact.manifest import Artifact, open_artifact, sha256
from partc.runtime.artifact.referenced_file import REMEDY, change_of
from partc.runtime.artifact.tensors.safetensors_stream import sound_header
from partc.runtime.errors import ArtifactError, Violation
from partc.runtime.files.regular import fault, unlisted

_COMPILE_AGAIN = "compile the model again, or copy the whole folder again"


def read_artifact(folder: Path) -> tuple[Artifact | None, list[Violation]]:
    """The artifact in `folder`, or None with the reasons why this version cannot read it."""
    try:
        return open_artifact(folder, trust=True), []
    except ArtifactError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        help = next((line.removeprefix("help: ") for line in lines if line.startswith("help: ")), "")
        facts = (line.split(": ", 1) for line in lines if not line.startswith("help: "))
        return None, [Violation(fact[0], fact[-1], help=help) for fact in facts]


def check_folder(folder: Path, manifest: Manifest) -> list[Violation]:
    """Returns the differences between the folder's files and the manifest's list of them; a file that differs is not read further."""
    changed = [one for name, record in sorted(manifest.files.items()) for one in _check_file(folder, name, record)]
    others = unlisted(folder, {*manifest.files, MANIFEST})
    unknown = (Violation(name, "the manifest does not list it", help="remove it from the folder") for name in others)
    return [*changed, *unknown]


def _check_file(folder: Path, name: str, record: FileRecord) -> Iterator[Violation]:
    path = folder / name
    if record.path and (why := change_of(record)):
        yield Violation(record.path, f"weights are read from it: {why}", help=REMEDY)
    if record.path:
        return
    if record.absent:
        if os.path.lexists(path):
            yield Violation(
                name, "it is there, and the manifest says that the artifact has no weights", help=_COMPILE_AGAIN
            )
        return
    if not path.exists():
        yield Violation(name, "the manifest lists it, and it is not there", help=_COMPILE_AGAIN)
        return
    if why := fault(path):
        yield Violation(name, f"it {why}", help=_COMPILE_AGAIN)
        return
    if not path.resolve().is_relative_to(folder.resolve()):
        yield Violation(name, f"it points outside the folder, to {path.resolve()}", help="put the file itself there")
        return
    size = path.stat().st_size
    if size != record.bytes:
        yield Violation(name, f"it has {size} bytes; the manifest says {record.bytes}", help=_COMPILE_AGAIN)
    elif (digest := sha256(path)) != record.sha256:
        fact = f"its content has changed: sha256 {digest[:12]}…, the manifest says {record.sha256[:12]}…"
        yield Violation(name, fact, help=_COMPILE_AGAIN)
    elif name.endswith(".safetensors"):
        try:
            sound_header(path)
        except ValueError as error:
            yield Violation(name, str(error), help=_COMPILE_AGAIN)
