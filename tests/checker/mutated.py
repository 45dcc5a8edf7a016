"""Artifacts that somebody changed, with hashes that fit: what the checker has to tell without their help."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from flat_manifest import edit
from partc.runtime.artifact.format import MANIFEST
from partc.runtime.checker.check import check_artifact
from run_steps import decide_again


def change_file(folder: Path, file: str, change: Callable[[onnx.ModelProto], object]) -> None:
    """Changes a rank file and corrects its record in the manifest."""
    model = onnx.load(folder / file, load_external_data=False)
    change(model)
    (folder / file).write_bytes(model.SerializeToString(deterministic=True))
    correct(folder)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object], program: str = "") -> None:
    """Changes the manifest as a program needs it, by default the main one."""
    data = json.loads((folder / MANIFEST).read_text())
    edit(data, change, program)
    (folder / MANIFEST).write_text(json.dumps(data))


def correct(folder: Path) -> None:
    """Sizes and hashes of all files that there are, as they are now."""
    data = json.loads((folder / MANIFEST).read_text())
    for name in data["files"]:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            data["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(data))
    decide_again(folder)


def texts(folder: Path) -> str:
    """All violations of an artifact."""
    return "\n".join(str(violation) for violation in check_artifact(folder))


def rewrite_raw(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest as it is written; sizes and hashes of the files that there are are made right again."""
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data))
    correct(folder)
