"""Copies of an artifact with changed rank files, for measurements and inspection."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import onnx
from partc.compiler.emit.run_list import run_list
from partc.runtime.artifact.format import MANIFEST, OF_RANKS, WEIGHTS, FileRecord, Manifest, run_list_file
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.manifest_file import ManifestFile
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.files.replace import remove_file
from partc.runtime.files.writers import write_new

Change: TypeAlias = Callable[[int, onnx.ModelProto, Manifest], Manifest]
"""Changes the model of a rank, and returns the program's new manifest."""


def variant(folder: Path, out: Path, change: Change, apart: bool = False) -> Path:
    """Writes a copy of the artifact in `folder` with every rank file changed; `change` gets the lowest rank of each file.

    The copy has no hashes, and is to be trusted. With `apart` every rank gets its own file. The artifact's other programs are changed in
    the same way, with tasks unrolled to nodes. If `out` already is a copy of the same folder, its weights are not written again.
    """
    artifact = open_artifact(folder, trust=True)
    other_numbers = filter(None, artifact.manifest.numbers.values())
    stays = shutil.ignore_patterns(*[WEIGHTS] * out.exists(), *other_numbers)
    shutil.copytree(folder, out, ignore=stays, dirs_exist_ok=True)
    files = {name: record for name, record in artifact.manifest.files.items() if (out / name).exists() or record.path}
    changed = [_changed(out, artifact.program_named(name).manifest, change, apart, files) for name in artifact.programs]
    remove_file(out / MANIFEST)
    index = ManifestFile.of([one.model_copy(update={"files": files}) for one in changed])
    write_new(out / MANIFEST, index.model_dump_json().encode())
    return out


def _changed(folder: Path, manifest: Manifest, change: Change, apart: bool, files: dict[str, FileRecord]) -> Manifest:
    """Changes the rank files of a program and returns its new manifest; adds the written files to `files`."""
    before = [manifest.program(rank) for rank in range(manifest.ranks)]
    models = {file: unrolled(read_model(folder / file)) for file in before}
    own = [f"{manifest.prefix}own_{rank:04d}.onnx" for rank in range(manifest.ranks)]
    for file in models:
        ranks = [rank for rank, one in enumerate(before) if one == file]
        for rank in ranks if apart else ranks[:1]:
            model = onnx.ModelProto()
            model.CopyFrom(models[file])
            manifest = change(rank, model, manifest)
            if apart:
                for entry in model.metadata_props:
                    if entry.key == OF_RANKS:
                        entry.value = str(rank)
            name = own[rank] if apart else file
            written = {name: model.SerializeToString()}
            if run_list_file(file) in files:
                kept = [record.value for record in manifest.state if rank in record.ranks]
                listed = run_list(model, manifest.name, manifest.guard, kept)
                written[run_list_file(name)] = listed.text().encode()
            for path, data in written.items():
                remove_file(folder / path)
                write_new(folder / path, data)
                files[path] = FileRecord(bytes=len(data), sha256="")
    return manifest.model_copy(update={"rank_files": own}) if apart else manifest
