"""Files outside an artifact from which weights are read: their record, and whether a file is still the recorded one.

The contents of such a file are not hashed, since they may have hundreds of gigabytes. Its size, the time of its last change and the hash
of its safetensors header distinguish it from a file with other tensors and from one that was written again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from partc.runtime.artifact.format import FileRecord
from partc.runtime.artifact.tensors.safetensors_stream import sound_header
from partc.runtime.files.regular import fault

REMEDY = "compile again, or put the file back as it was, with its time (cp -p)"


def referenced(path: Path) -> FileRecord:
    """Returns the record of a file outside the artifact from which weights are read."""
    status = os.stat(path)
    return FileRecord(bytes=status.st_size, sha256=_header(path), path=str(path), modified=_time(status))


def change_of(record: FileRecord) -> str:
    """Why a file is not the one that was recorded; empty if it is."""
    path = Path(record.path)
    if not path.is_absolute():
        return "its path is not absolute"
    if why := fault(path):
        return why
    status = os.stat(path)
    if status.st_size != record.bytes:
        return f"it has {status.st_size} bytes, and had {record.bytes} when the artifact was compiled"
    if record.sha256 and _header(path) != record.sha256:
        return "it has another safetensors header than when the artifact was compiled"
    if _time(status) != record.modified:
        return "it was written again since the artifact was compiled"
    return ""


def _time(status: os.stat_result) -> str:
    """The time of a file's last change, in seconds."""
    whole, part = divmod(status.st_mtime_ns, 10**9)
    return f"{whole}.{part:09d}"


def _header(path: Path) -> str:
    """The SHA-256 of the header of a safetensors file; empty for any other file."""
    try:
        return hashlib.sha256(sound_header(path)[0]).hexdigest()
    except ValueError:
        return ""
