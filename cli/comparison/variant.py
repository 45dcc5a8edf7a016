"""Copies of an artifact whose rank files are changed: for measuring, and for looking at what is inside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
from partc.runtime.artifact.format import MANIFEST, OF_RANKS, WEIGHTS, FileRecord, Manifest
from partc.runtime.artifact.manifest import open_artifact


def variant(
    folder: Path, out: Path, change: Callable[[int, onnx.ModelProto, Manifest], Manifest], apart: bool = False
) -> Path:
    """The artifact in `folder` with every rank file changed, `change` getting the lowest rank that has it.

    The copy has no hashes, and is to be trusted. With `apart` every rank gets a file of its own. Programs inside of the artifact
    are changed alike. Where `out` is there already, from the same folder, its weights are left as they are.
    """
    stays = shutil.ignore_patterns(WEIGHTS) if out.exists() else None
    shutil.copytree(folder, out, ignore=stays, dirs_exist_ok=True)
    for manifest_file in sorted(out.rglob(MANIFEST)):
        inside = manifest_file.parent
        manifest = open_artifact(inside, trust=True).manifest
        before = [manifest.program(rank) for rank in range(manifest.ranks)]
        models = {file: onnx.load(inside / file, load_external_data=False) for file in before}
        names = {file: [rank for rank, one in enumerate(before) if one == file] for file in models}
        for file, ranks in names.items():
            for rank in ranks if apart else ranks[:1]:
                model = onnx.ModelProto()
                model.CopyFrom(models[file])
                manifest = change(rank, model, manifest)
                if apart:
                    _name_rank(model, rank)
                name = f"own_{rank:04d}.onnx" if apart else file
                data = model.SerializeToString()
                (inside / name).unlink(missing_ok=True)
                (inside / name).write_bytes(data)
                record = FileRecord(bytes=len(data), sha256="")
                manifest = manifest.model_copy(update={"files": {**manifest.files, name: record}})
        if apart:
            own = [f"own_{rank:04d}.onnx" for rank in range(manifest.ranks)]
            manifest = manifest.model_copy(update={"programs": own})
        manifest_file.unlink()
        manifest_file.write_text(manifest.model_dump_json(), encoding="utf-8")
    return out


def _name_rank(model: onnx.ModelProto, rank: int) -> None:
    """Makes the file the program of this rank alone."""
    for entry in model.metadata_props:
        if entry.key == OF_RANKS:
            entry.value = str(rank)
